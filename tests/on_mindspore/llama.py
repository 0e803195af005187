"""A small decoder of Llama's shape, made of the newer ops: RMS norms, rotary attention, a gated feed-forward network."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops

__all__ = ["DEPTH", "HEADS", "LENGTH", "ROWS", "VOCABULARY", "WIDTH", "Llama", "tokens"]

WIDTH, HEADS, DEPTH, VOCABULARY = 16, 2, 4, 19
ROWS, LENGTH = 2, 6


class RMSNorm(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = mindspore.Parameter(mint.ones((WIDTH,)))

    def construct(self, x: Any) -> Any:
        return x * mint.rsqrt(mint.mean(mint.square(x), -1, True) + 1e-5) * self.weight


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (mint.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def construct(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = (
            mint.transpose(projection(x).reshape(rows, length, HEADS, WIDTH // HEADS), 1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        scores = mint.matmul(q, mint.transpose(k, -1, -2)) / (WIDTH // HEADS) ** 0.5 + mask
        mixed = mint.transpose(mint.matmul(mint.nn.functional.softmax(scores, -1), v), 1, 2)
        return self.o(mixed.reshape(rows, length, WIDTH))


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    left, right = mint.chunk(x, 2, dim=-1)
    return x * cos + mint.cat((0 - right, left), -1) * sin


class Gated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (mint.nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = mint.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def construct(self, x: Any) -> Any:
        return self.down(mint.nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention()
        self.feed_forward_norm, self.feed_forward = RMSNorm(), Gated()

    def construct(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Cell):
    """The loss of one batch of tokens, each position predicting the next."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.embedding = mindspore.Parameter(_numbers((VOCABULARY, WIDTH), 3))
        self.layers = nn.CellList([wrap(Layer()) for _ in range(DEPTH)])
        self.norm, self.head = RMSNorm(), mint.nn.Linear(WIDTH, VOCABULARY, bias=False)
        for seed, parameter in enumerate(self.get_parameters()):
            parameter.set_data(_numbers(parameter.shape, seed))
        angles = np.outer(np.arange(LENGTH), 1.0 / 10 ** np.linspace(0, 1, WIDTH // HEADS)).astype(np.float32)
        self.tables = (mindspore.Tensor(np.cos(angles)), mindspore.Tensor(np.sin(angles)))
        self.mask = mindspore.Tensor(np.triu(np.full((LENGTH, LENGTH), -1e9, np.float32), 1))

    def construct(self, tokens: Any) -> Any:
        x = ops.gather(self.embedding, tokens, 0)
        for layer in self.layers:
            x = layer(x, *self.tables, self.mask)
        logits = self.head(self.norm(x))
        return ops.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def _numbers(shape: Any, seed: int) -> Any:
    return mindspore.Tensor(np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * 0.3)


def tokens(seed: int = 0) -> Any:
    return mindspore.Tensor(np.random.RandomState(seed).randint(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32))
