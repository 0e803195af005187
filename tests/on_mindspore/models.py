"""Small models, one for each thing that a network may do to its activations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import mint, nn, ops

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
    "Packet",
    "Pair",
    "SmoothBlock",
]

WIDTH = 8


class Block(nn.Cell):
    """A pre-norm residual block: older primitives (LayerNorm, BiasAdd) and newer ops."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((width,))
        self.up = nn.Dense(width, 2 * width)
        self.down = mint.nn.Linear(2 * width, width)

    def construct(self, x: Any) -> Any:
        return x + self.down(ops.gelu(self.up(self.norm(x))))


class SmoothBlock(nn.Cell):
    """Ops whose second derivatives MindSpore has on the CPU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = mindspore.Parameter(
            mindspore.Tensor(np.random.RandomState(3).standard_normal((width, width)).astype(np.float32) / 3)
        )

    def construct(self, x: Any) -> Any:
        return x + mint.tanh(mint.matmul(x, self.weight)) * mint.exp(x * 0.1)


class Attention(nn.Cell):
    """Attention over q, k, v chunks of one matmul, with shared rotary tables and an expanded mask."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = mint.nn.Linear(width, 3 * width)
        self.out = nn.Dense(width, width)

    def construct(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            mint.transpose(part.reshape(batch, length, self.heads, width // self.heads), 1, 2)
            for part in mint.chunk(self.qkv(x), 3, dim=-1)
        )
        q, k = q * cos + (0 - q) * sin, k * cos + (0 - k) * sin
        scores = mint.matmul(q, mint.transpose(k, -1, -2)) * mask.broadcast_to((batch, self.heads, length, length))
        mixed = mint.transpose(mint.matmul(ops.softmax(scores, -1), v), 1, 2)
        return x + self.out(mixed.reshape(batch, length, width))


class DropoutBlock(nn.Cell):
    """Three random ops, so that a skipped one must not move the next."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Dense(width, width)
        self.second = mint.nn.Linear(width, width)
        self.drop = nn.Dropout(p=0.3)
        self.set_train()

    def construct(self, x: Any) -> Any:
        h = self.drop(mint.sigmoid(self.first(x)))
        h = h * ops.uniform(h.shape, mindspore.Tensor(0.0), mindspore.Tensor(1.0))
        return x + ops.dropout(self.second(h + ops.randn(*h.shape)), p=0.5)


class InPlaceBlock(nn.Cell):
    """The one change in place that MindSpore's CPU makes and counts: ``copy_``."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Dense(width, width)
        self.second = mint.nn.Linear(width, width)

    def construct(self, x: Any) -> Any:
        h = self.first(x)
        h.copy_(h + x)
        out = self.second(ops.relu(h))
        out.copy_(out * 0.5)
        return out


class NormBlock(nn.Cell):
    """A block with statistics that forward changes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = mint.nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.set_train()

    def construct(self, x: Any) -> Any:
        return x + mint.tanh(self.norm(self.linear(x)))


class LowRank(nn.Cell):
    """A frozen layer with a trainable low-rank part beside it."""

    def __init__(self, width: int = WIDTH, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Dense(width, width)
        for parameter in self.base.get_parameters():
            parameter.requires_grad = False
        self.down = mint.nn.Linear(width, rank, bias=False)
        self.up = mint.nn.Linear(rank, width, bias=False)

    def construct(self, x: Any) -> Any:
        return mint.tanh(self.base(x) + self.up(self.down(x)))


class Experts(nn.Cell):
    """Top-1 routing by hand; an expert may get no token at all, and is then not called."""

    def __init__(self, experts: list[Any], width: int = WIDTH) -> None:
        super().__init__()
        self.router = mint.nn.Linear(width, len(experts))
        self.experts = nn.CellList(experts)

    def construct(self, x: Any, choice: tuple[int, ...]) -> Any:
        weights = ops.softmax(self.router(x), -1)
        rows = []
        for row, index in enumerate(choice):
            rows.append(self.experts[index](x[row : row + 1]) * weights[row : row + 1, index : index + 1])
        return mint.cat(rows, 0)


class Chain(nn.Cell):
    """Layers one after the other."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = nn.CellList(layers)

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Bottle(nn.Cell):
    """A U: the output of each way down is used again on the way up."""

    def __init__(self, down: list[Any], up: list[Any]) -> None:
        super().__init__()
        self.down = nn.CellList(down)
        self.up = nn.CellList(up)

    def construct(self, x: Any) -> Any:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer in self.up:
            x = layer(x * kept.pop())
        return x


class Crossing(nn.Cell):
    """A decoder layer that reads the encoder's output."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.q = mint.nn.Linear(width, width)
        self.k = nn.Dense(width, width)

    def construct(self, x: Any, memory: Any) -> Any:
        weights = ops.softmax(mint.matmul(self.q(x), self.k(memory).T), -1)
        return x + mint.matmul(weights, memory)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Packet:
    body: Any
    extra: dict[str, Any]
    label: str = "packet"
