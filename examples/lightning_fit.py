"""A LightningModule, as it is and with one more line.

python -m examples.lightning_fit
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from hyper_parallel.integrations.lightning import callback
from hyper_parallel.testing import simulated_accelerator


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = (self.encoder(batch) - batch.roll(1, dims=1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(callbacks: list[Any]) -> list[float]:
    lightning.seed_everything(0, verbose=False)
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,  # this is the line
    )
    trainer.fit(module, DataLoader(list(torch.randn(12, 64, 64)), batch_size=4))
    return module.losses


def main() -> None:
    for name, callbacks in {"plain": [], "boundary": [callback("boundary")]}.items():
        with simulated_accelerator() as accelerator:
            losses = train(callbacks)
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
