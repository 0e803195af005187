"""A transformer block with fused attention, ways to wrap it, and a step to compare by; all on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 2, 128, 256, 4, 4

SWAP_MATMULS = ByOpName(dict.fromkeys(("mm", "addmm"), CheckpointPolicy.MUST_SWAP))
Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "swap": hp.swap_wrapper,
    "checkpoint": hp.checkpoint_wrapper,
    "checkpoint_swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "selective": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS),
    "selective_swap_inputs": lambda block: hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS, swap_inputs=True),
    "swap_inside_checkpoint": lambda block: hp.checkpoint_wrapper(hp.swap_wrapper(block), swap_inputs=True),
    "selective_inside_swap": lambda block: hp.swap_wrapper(hp.checkpoint_wrapper(block, policy_fn=SWAP_MATMULS)),
}
SWAPPING = {name: wrap for name, wrap in WRAPS.items() if name != "checkpoint"}


class Block(nn.Module):
    """Attention over q, k, v of one matmul, then a feed-forward part; dropout in both."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.first_norm(x)).chunk(3, dim=-1)
        )
        probability = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=probability, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)), probability)
        return x + F.dropout(self.down(F.gelu(self.up(self.second_norm(x)))), probability)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, dropout: float, wrap: Wrap) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(wrap(Block(dropout)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(wrap: Wrap = lambda block: block, *, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> Stack:
    """The same weights every time."""
    torch.manual_seed(0)
    return Stack(dropout, wrap).to("cuda", dtype)


def batch(seed: int = 0, *, dtype: torch.dtype = torch.float32, rows: int = BATCH) -> torch.Tensor:
    """An input that needs a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, LENGTH, WIDTH, generator=generator).to("cuda", dtype).requires_grad_()


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """Depends on every element."""
    return (output.float() * output.float().sin()).mean()


def gradients(model: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of all gradients, by name; the model's own are cleared."""
    named = [*model.named_parameters(), *((f"input {index}", x) for index, x in enumerate(inputs))]
    found = {name: tensor.grad.detach().clone() for name, tensor in named if tensor.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def step(model: nn.Module, *, seed: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Forward and backward from a fixed random state."""
    x = batch(seed, dtype=dtype)
    torch.manual_seed(seed)
    loss = loss_of(model(x))
    loss.backward()
    return {"loss": loss.detach().clone()} | gradients(model, x)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names and the same bits; NaN on the expected side is a broken test."""
    torch.cuda.synchronize()
    assert got.keys() == wanted.keys(), f"tensors {sorted(got)} instead of {sorted(wanted)}"
    broken = [name for name, tensor in wanted.items() if not bool(tensor.isfinite().all())]
    assert not broken, f"the run without the engine made values that are not finite: {broken}"
    different = [
        f"{name} (largest difference {(got[name].double() - wanted[name].double()).abs().max().item()})"
        for name in wanted
        if not torch.equal(got[name], wanted[name])
    ]
    assert not different, f"{len(different)} of {len(wanted)} differ: {', '.join(different)}"


def assert_swapped() -> None:
    """Bytes left the device and came back."""
    stats = hp.stats()
    assert stats.swapped_out_bytes > 0, f"nothing left the device: {stats}"
    assert stats.swapped_in_bytes > 0, f"nothing came back: {stats}"
