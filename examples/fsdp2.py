"""FSDP2 as it is, and with one more line, on any number of processes.

torchrun --nproc-per-node 2 -m examples.fsdp2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hyper_parallel.integrations import fsdp
from hyper_parallel.testing import simulated_accelerator


def train(what: str | None) -> list[float]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    if what is not None:
        fsdp.apply(model, what)  # this is the line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        batch = torch.randn(4, 64, 64)
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 6))
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    for what in (None, "boundary"):
        with simulated_accelerator() as accelerator:
            losses = train(what)
        if dist.get_rank() == 0:
            print(f"{what or 'plain':10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
