"""A policy decides op by op: attention leaves for far memory, matmuls stay, the rest is run again.

python -m examples.checkpoint_policy

It runs on the simulated accelerator, so that it shows something on a machine without a GPU. On one with a GPU, move model and
batch there and leave ``simulated_accelerator`` out; the peak is then ``torch.cuda.max_memory_allocated()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy as P
from hyper_parallel.testing import simulated_accelerator


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> P:
    if "scaled_dot_product" in str(op):
        return P.MUST_SWAP  # dear to run again, and it has time to leave
    if "addmm" in str(op):
        return P.PREFER_SAVE
    return P.PREFER_RECOMPUTE


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda layer: layer,
    "recompute": hp.checkpoint_wrapper,
    "inputs": lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True),
    "policy": lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True, policy_fn=policy),
}


def main() -> None:
    for name, wrap in WRAPS.items():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
        for number, block in enumerate(model.layers):
            model.layers[number] = wrap(block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        batch, losses = torch.randn(8, 128, 32), []
        with simulated_accelerator() as accelerator:
            for _ in range(3):
                loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")


if __name__ == "__main__":
    main()
