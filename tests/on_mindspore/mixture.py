"""A small decoder with a mixture of experts: the two best of four experts for every token, by a router that is trained."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops

__all__ = ["LENGTH", "ROWS", "WIDTH", "Mixture", "batch"]

WIDTH, EXPERTS, CHOSEN, DEPTH = 16, 4, 2, 4
ROWS, LENGTH = 48, 8


class Expert(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = mint.nn.Linear(WIDTH, 2 * WIDTH, bias=False), mint.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def construct(self, x: Any) -> Any:
        return self.down(mint.nn.functional.silu(self.up(x)))


class Experts(nn.Cell):
    """Every token goes to its experts only: how many rows an expert gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = mint.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.CellList([Expert() for _ in range(EXPERTS)])

    def construct(self, x: Any) -> Any:
        flat = x.reshape(-1, WIDTH)
        shares = mint.nn.functional.softmax(self.router(flat), -1)
        best = np.argsort(-shares.asnumpy(), axis=-1, kind="stable")[:, :CHOSEN]
        total = mint.zeros((flat.shape[0], WIDTH), dtype=flat.dtype)
        for number, expert in enumerate(self.experts):
            rows = np.flatnonzero((best == number).any(-1)).astype(np.int32)
            if rows.size == 0:
                continue
            index = mindspore.Tensor(rows)
            mine = expert(ops.gather(flat, index, 0)) * ops.gather(shares[:, number : number + 1], index, 0)
            total = total + ops.tensor_scatter_add(ops.zeros_like(total), index.reshape(-1, 1), mine)
        return total.reshape(x.shape)


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.mix = mint.nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def construct(self, x: Any) -> Any:
        x = x + mint.tanh(self.mix(x))
        return x + self.experts(x)


class Mixture(nn.Cell):
    """The loss of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(DEPTH)])
        self.head = mint.nn.Linear(WIDTH, WIDTH, bias=False)
        for seed, parameter in enumerate(self.get_parameters()):
            numbers = np.random.RandomState(seed).standard_normal(parameter.shape).astype(np.float32)
            parameter.set_data(mindspore.Tensor(numbers * 0.3))

    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return mint.mean(mint.square(self.head(x)))


def batch() -> Any:
    return mindspore.Tensor(np.random.RandomState(7).standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32))
