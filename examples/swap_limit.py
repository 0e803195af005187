"""Swap everything, and say how much memory the device may hold: room that is free is used, and not much more.

python -m examples.swap_limit

Without ``device_bytes`` copies leave as soon as they can. With it they hold compute up only once the device is that full. It is
no hard limit: one layer's backward comes on top. ``hp.fit_memory`` (examples/budget.py) finds the number for a budget.
"""

from __future__ import annotations

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator


def train(config: hp.SwapConfig | None) -> tuple[int, list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
    if config is not None:
        for number, block in enumerate(model.layers):
            model.layers[number] = hp.swap_wrapper(block, swap_config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, losses = torch.randn(8, 128, 32), []
    with simulated_accelerator() as accelerator:  # on a GPU: leave it out
        for _ in range(3):
            loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return accelerator.peak_bytes, losses


def main() -> None:
    settings = {
        "min_bytes": 0,
        "tail_bytes": 0,
        "window_bytes": "256KiB",
        "prefetch_bytes": "256KiB",
    }  # for tiny tensors
    rows = {
        "plain": None,
        "12 MiB": hp.SwapConfig(device_bytes="12MiB", **settings),
        "8 MiB": hp.SwapConfig(device_bytes="8MiB", **settings),
        "unset": hp.SwapConfig(**settings),
    }
    for name, config in rows.items():
        peak, losses = train(config)
        print(f"{name:10} peak {peak / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
