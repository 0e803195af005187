"""Blocks whose work is so small that a step takes what the host takes to issue it. `tape_cost` runs them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

CHAIN_TRIPLES = 100
_WIDTH = 32
_HEADS = 4
_HIDDEN = 64
_BASE_DTYPE = torch.float64  # stands for bfloat16, whose products take a CPU longer to set up than to compute


class Chain(nn.Module):
    """``mm``, ``silu`` and ``add`` of 8 x 8 values, many times."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN_TRIPLES):
            x = F.silu(x @ self.weight) + x
        return x


class LoraLinear(nn.Module):
    """A frozen linear with an adapter of another dtype, in the ops of PEFT: both casts, dropout 0, and the sum."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=_BASE_DTYPE).requires_grad_(False)
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)
        self.dropout = nn.Identity()
        self.scaling = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        dtype = result.dtype
        adapted = self.up(self.down(self.dropout(x.to(self.down.weight.dtype)))) * self.scaling
        return (result + adapted).to(dtype)


class Norm(nn.Module):
    """A root-mean-square norm in single ops, computed in float32."""

    def __init__(self, dtype: torch.dtype, *, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, dtype=dtype), requires_grad=is_trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotary embedding in single ops."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Layer(nn.Module):
    """A decoder layer as transformers writes it; with adapters its own weights are frozen."""

    width = _WIDTH

    def __init__(self, *, has_adapters: bool) -> None:
        super().__init__()
        dtype = _BASE_DTYPE if has_adapters else torch.float32

        def linear(inputs: int, outputs: int) -> nn.Module:
            return LoraLinear(inputs, outputs) if has_adapters else nn.Linear(inputs, outputs, bias=False)

        self.dtype = dtype
        self.norms = nn.ModuleList(Norm(dtype, is_trained=not has_adapters) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(_WIDTH, _WIDTH) for _ in range(4))
        self.gate, self.up, self.down = linear(_WIDTH, _HIDDEN), linear(_WIDTH, _HIDDEN), linear(_HIDDEN, _WIDTH)
        self.cos, self.sin = (torch.randn(1, 1, 8, _WIDTH // _HEADS, dtype=dtype) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = self.norms[0](x)
        query, key, value = (
            linear(normed).view(batch, length, _HEADS, -1).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        cos, sin = self.cos[:, :, :length], self.sin[:, :, :length]
        attended = F.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True
        )
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Experts(nn.Module):
    """A mixture of experts with a Python loop over the experts, two for each token."""

    width = _WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleList((nn.Linear(_WIDTH, _HIDDEN, bias=False), nn.Linear(_HIDDEN, _WIDTH, bias=False)))
            for _ in range(8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, _WIDTH)
        weights, chosen = torch.topk(F.softmax(self.router(tokens), dim=-1), 2, dim=-1)
        output = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            given = down(F.silu(up(tokens[rows]))) * weights[rows, places, None]
            output = output.index_add(0, rows, given)
        return x + output.view_as(x)


def blocks_named(name: str, count: int, device: str) -> tuple[list[nn.Module], torch.Tensor]:
    """Blocks of a case, and what the first is called with."""
    torch.manual_seed(0)
    has_adapters = name == "LoRA layer"
    with torch.device(device):
        if name == "chain":
            return [Chain() for _ in range(count)], torch.randn(8, Chain.width).requires_grad_()
        x = torch.randn(1, 8, _WIDTH, dtype=_BASE_DTYPE if has_adapters else torch.float32).requires_grad_()
        return [Experts() if name == "experts" else Layer(has_adapters=has_adapters) for _ in range(count)], x


CASES = ("chain", "LoRA layer", "experts", "decoder layer")
