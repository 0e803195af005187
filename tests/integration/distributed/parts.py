"""A small transformer-like model, the ways to wrap its blocks, and a step to compare by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.testing import simulated_accelerator

WIDTH, ROWS, BLOCKS = 16, 32, 4

SWAP_MATMULS = ByOpName(dict.fromkeys(("mm", "addmm"), CheckpointPolicy.MUST_SWAP))

Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "swap": hp.swap_wrapper,
    "checkpoint_swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "selective": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS),
    "selective_swap_inputs": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS, swap_inputs=True),
}


class Block(nn.Module):
    """Norm, two linears, gelu, dropout, residual."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Entry, blocks, exit."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skipped: int | None = None) -> torch.Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return self.leave(x)


def stack(dropout: float = 0.1) -> Stack:
    """The same weights on every rank, every time."""
    torch.manual_seed(0)
    return Stack(dropout)


def wrap_blocks(model: Any, wrap: Wrap) -> None:
    """Put the wrapped block in the place of each block."""
    for index in range(len(model.blocks)):
        model.blocks[index] = wrap(model.blocks[index])


def batch(rank: int, part: int = 0) -> torch.Tensor:
    """Other data on every rank and in every part."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * rank + part))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Something with a gradient that depends on every element."""
    return (output * output.sin()).mean()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient, taken out of the model."""
    found = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """The same names, the same bits; and something to compare."""
    assert got.keys() == wanted.keys(), f"{what}: gradients of {sorted(got)} instead of {sorted(wanted)}"
    different = [
        f"{name} (off by {(got[name] - wanted[name]).abs().max()})"
        for name in wanted
        if not torch.equal(got[name], wanted[name])
    ]
    assert not different, f"{what}: {', '.join(different)}"
    assert any(bool(gradient.any()) for gradient in wanted.values()), f"{what}: nothing to compare"


@contextlib.contextmanager
def swapping(what: str) -> Iterator[None]:
    """The simulated accelerator with late copies; at the end something must have left."""
    hp.SwapManager().reset()
    with simulated_accelerator(timing="lazy", window_bytes=256) as sim:
        yield
        assert sim.swapped_bytes > 0, f"{what}: nothing was swapped: {hp.stats()}"
        assert hp.stats().swapped_in_bytes > 0, f"{what}: nothing came back: {hp.stats()}"
