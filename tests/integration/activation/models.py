"""Small models, one for each thing that a network may do to its activations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "WIDTH",
    "Attention",
    "Block",
    "Bottle",
    "Chain",
    "Crossing",
    "DropoutBlock",
    "Experts",
    "InPlaceBlock",
    "LowRank",
    "NormBlock",
    "Pair",
    "Packet",
]

WIDTH = 8


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention over q, k, v chunks of one matmul, with shared rotary tables and an expanded mask."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = q * cos + q.roll(1, -1) * sin, k * cos + k.roll(1, -1) * sin
        scores = q @ k.transpose(-1, -2) * mask.expand(batch, self.heads, length, length)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))


class DropoutBlock(nn.Module):
    """Three random ops, so that a skipped one must not move the next."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.first(x).sigmoid(), 0.3)
        h = h * torch.rand_like(h)
        return x + F.dropout(self.second(torch.bernoulli(h.detach().clamp(0, 1)) + h), 0.5)


class InPlaceBlock(nn.Module):
    """In-place residual add and in-place activations inside a layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h += x
        h = self.act(h)
        out = self.second(h)
        out += x
        out.mul_(0.5)
        return out


class NormBlock(nn.Module):
    """A block with buffers that forward changes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x)).tanh()


class LowRank(nn.Module):
    """A frozen layer with a trainable low-rank part beside it."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Experts(nn.Module):
    """Top-1 routing; an expert may get no token at all."""

    def __init__(self, experts: list[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts))
        self.experts = nn.ModuleList(experts)

    def forward(self, x: torch.Tensor, forbidden: int) -> torch.Tensor:
        logits = self.router(x)
        logits = logits.masked_fill(F.one_hot(torch.tensor(forbidden), len(self.experts)).bool(), float("-inf"))
        weight, choice = logits.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return out


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Bottle(nn.Module):
    """A U: the output of each way down is used again on the way up."""

    def __init__(self, down: list[nn.Module], up: list[nn.Module]) -> None:
        super().__init__()
        self.down = nn.ModuleList(down)
        self.up = nn.ModuleList(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x * kept.pop())
        return x


class Crossing(nn.Module):
    """A decoder layer that reads the encoder's output."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(memory).t()).softmax(-1)
        return x + weights @ memory


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Packet:
    body: torch.Tensor
    extra: dict[str, Any]
    label: str = "packet"
