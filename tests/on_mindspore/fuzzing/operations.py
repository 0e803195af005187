"""The operations of fuzzed programs on MindSpore: total functions over float32 tensors of any shape with a dimension.

Operands adapt: ``fit`` makes a last dimension, ``like`` a shape, ``two`` a matrix, ``small`` keeps what could grow without end.
What adapts is made of views, so that programs are full of them. ``owner`` is the cell whose construct runs.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import compat

__all__ = ["FUNCTIONS", "NORM_WIDTH", "SPECS", "Spec"]

NORM_WIDTH = 4
"""How many columns a cell's batch norm has."""
_F = mint.nn.functional


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What the generator needs to know of an operation."""

    ins: int = 1
    weights: str = ""  # one letter each: m(atrix), v(ector), o(wner)
    writes: bool = False  # changes a value that others may hold
    draws: bool = False


def fit(x: Any, columns: int) -> Any:
    if x.shape[-1] >= columns:
        return x[..., :columns]
    return mint.sum(x, -1, keepdim=True).broadcast_to((*x.shape[:-1], columns))


def like(x: Any, y: Any) -> Any:
    if x.shape == y.shape:
        return x
    if x.size >= y.size:
        return x.reshape(-1)[: y.size].reshape(y.shape)
    return mint.mean(x).broadcast_to(y.shape)


def two(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def small(x: Any) -> Any:
    return x if x.size <= 2048 else x.reshape(-1)[:64]


# ---------------------------------------------------------------- matrices


def linear(x: Any, w: Any) -> Any:
    return _F.linear(fit(small(x), w.shape[1]), w)


def linear_bias(x: Any, w: Any, b: Any) -> Any:
    return _F.linear(fit(small(x), w.shape[1]), w, fit(b, w.shape[0]))


def dense(x: Any, w: Any, b: Any) -> Any:
    """The older primitives, as ``nn.Dense`` uses them."""
    return ops.bias_add(ops.matmul(two(fit(small(x), w.shape[1])), w.T), fit(b, w.shape[0]))


def matmul(x: Any, y: Any) -> Any:
    x, y = two(small(x)), two(small(y))
    return mint.matmul(x, mint.transpose(fit(y, x.shape[1]), 0, 1)) / 4


def bmm(x: Any, y: Any) -> Any:
    x = two(small(x))
    y = mint.transpose(fit(two(small(y)), x.shape[1]), 0, 1)
    return mint.bmm(x.broadcast_to((2, *x.shape)), y.broadcast_to((2, *y.shape))) / 4


def attention(x: Any, y: Any) -> Any:
    x = two(small(x))
    y = fit(two(small(y)), x.shape[1])
    return mint.matmul(ops.softmax(mint.matmul(x, mint.transpose(y, 0, 1)) / 2, -1), y)


def embedding(x: Any, w: Any) -> Any:
    rows = np.abs(np.nan_to_num(two(small(x)).asnumpy()[:, 0] * 10)).astype(np.int64) % w.shape[0]
    return ops.gather(w, mindspore.Tensor(rows.astype(np.int32)), 0)


def layer_norm(x: Any, v: Any) -> Any:
    scale = fit(v, x.shape[-1])
    return ops.LayerNorm(-1, -1)(x, scale, mint.tanh(scale))[0]


def weight_view(x: Any, w: Any) -> Any:
    return w.T if min(w.shape) > 1 else w.T * 1.0  # a dense view would be written by copy_


def times_weight(x: Any, v: Any) -> Any:
    return x * fit(v, x.shape[-1])


# ---------------------------------------------------------------- elementwise, reductions


def tanh(x: Any) -> Any:
    return mint.tanh(x)


def relu(x: Any) -> Any:
    return ops.relu(x)


def gelu(x: Any) -> Any:
    return ops.gelu(x)


def sigmoid(x: Any) -> Any:
    return mint.sigmoid(x)


def silu(x: Any) -> Any:
    return _F.silu(x)


def exp(x: Any) -> Any:
    return mint.exp(mint.tanh(x))


def sin(x: Any) -> Any:
    return mint.sin(x)


def square(x: Any) -> Any:
    return mint.square(mint.tanh(x))


def softmax(x: Any) -> Any:
    return mint.nn.functional.softmax(x, -1)


def older_softmax(x: Any) -> Any:
    return ops.softmax(x, -1)


def clamp(x: Any) -> Any:
    return mint.clamp(x, -0.5, 0.75)


def half(x: Any) -> Any:
    return mint.tanh(x.to(mindspore.float16) * 3).to(mindspore.float32)


def double(x: Any) -> Any:
    return mint.exp(-mint.square(x.to(mindspore.float64))).to(mindspore.float32)


def add(x: Any, y: Any) -> Any:
    return x + like(y, x)


def mul(x: Any, y: Any) -> Any:
    return x * like(y, x)


def sub(x: Any, y: Any) -> Any:
    return mint.sub(x, like(y, x))


def div(x: Any, y: Any) -> Any:
    y = like(y, x)
    return mint.div(x, mint.square(y) + 1)


def where(x: Any, y: Any) -> Any:
    y = like(y, x)
    return mint.where(x > y, x, y * 0.5)


def cat(x: Any, y: Any) -> Any:
    return mint.cat((x, like(y, x)), -1)


def branch(x: Any, y: Any) -> Any:
    """Which ops run depends on the data."""
    return mint.tanh(x) * 2 if float(x.asnumpy().sum()) > 0 else x - like(y, x)


def mean(x: Any) -> Any:
    return mint.mean(x, -1, True)


def total(x: Any) -> Any:
    return mint.sum(x).reshape(1)


def amax(x: Any) -> Any:
    return mint.max(x, -1)[0].reshape(*x.shape[:-1], 1)


def gather(x: Any) -> Any:
    rows = two(x)
    index = mindspore.Tensor(np.arange(rows.shape[0], dtype=np.int32)[::-1].copy())
    return ops.gather(rows, index, 0)


# ---------------------------------------------------------------- views


def transpose(x: Any) -> Any:
    return mint.transpose(two(x), 0, 1)


def narrow(x: Any) -> Any:
    return mint.narrow(x, 0, 0, max(1, x.shape[0] // 2))


def columns(x: Any) -> Any:
    return x[..., x.shape[-1] // 2 :]


def chunk(x: Any) -> tuple[Any, ...]:
    return tuple(mint.chunk(x, 2, -1))


def split(x: Any) -> tuple[Any, ...]:
    return tuple(mint.split(x, max(1, x.shape[0] // 2), 0))[:3]


def expand(x: Any) -> Any:
    return mint.unsqueeze(small(x), 0).broadcast_to((2, *small(x).shape))


def flatten(x: Any) -> Any:
    return x.reshape(-1)


def unsqueeze(x: Any) -> Any:
    return mint.unsqueeze(x, 0) if x.ndim < 4 else x.reshape(-1)


def dense_copy(x: Any) -> Any:
    return x.contiguous()


# ---------------------------------------------------------------- writes, draws, state


def copied_into(x: Any, y: Any) -> Any:
    """A fresh value, changed in place once it was read."""
    h = x * 1.5
    seen = mint.tanh(h)
    h.copy_(like(y, h) + 0.25)
    return h + seen


def copy_(x: Any, y: Any) -> Any:
    """A value that others may hold is changed in place.

    On the CPU writing into a view is silently lost; so is, under any dispatch mode, the gradient of what is written into a value
    without a history.
    """
    is_whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    if x.param_info is not None or not is_whole or not x._requires_grad:
        x = x * 1.0
    x.copy_(like(y, x) * 0.5)
    return x


def item_set(x: Any, y: Any) -> Any:
    h = x * 1.25
    h[0] = like(y, h)[0]
    return h


def dropout(x: Any) -> Any:
    return ops.dropout(x, p=0.4)


def randn(x: Any) -> Any:
    return x + ops.randn(*x.shape)


def uniform(x: Any) -> Any:
    return x * ops.uniform(x.shape, mindspore.Tensor(0.0), mindspore.Tensor(1.0))


def python_draws(x: Any) -> Any:
    return x * random.random()


def numpy_draws(x: Any) -> Any:
    return x + float(np.random.rand())


def detach(x: Any) -> Any:
    return ops.stop_gradient(x) * 0.5


class _Wave(compat.Function):  # type: ignore[misc]
    """An autograd function that saves an input, an output and what is neither."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        out = mint.sin(x)
        ctx.save_for_backward(x, out, mint.square(x))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, out, squared = ctx.saved_tensors
        return gradient * (mint.cos(x) + out * 0.125 + squared * 0.25)


def custom(x: Any) -> Any:
    return _Wave.apply(mint.tanh(x))


def state_counts(x: Any, owner: Any) -> Any:
    owner.counts.append(len(owner.counts) + 1)
    return x * math.sin(owner.counts[-1])


def state_buffer(x: Any, owner: Any) -> Any:
    owner.calls.copy_(owner.calls + 1)
    return x + owner.calls.asnumpy().item() * 0.125


def batch_norm(x: Any, owner: Any) -> Any:
    x = fit(two(small(x)), NORM_WIDTH)
    return owner.norm(x if x.shape[0] > 1 else mint.cat((x, x * 0.5), 0))


_ONE, _PAIR = Spec(), Spec(ins=2)
_MATRIX, _MATRIX_BIAS, _VECTOR = Spec(weights="m"), Spec(weights="mv"), Spec(weights="v")
_DRAWS, _STATE = Spec(draws=True), Spec(weights="o")

_TABLE: tuple[tuple[Callable[..., Any], Spec], ...] = (
    (linear, _MATRIX),
    (linear_bias, _MATRIX_BIAS),
    (dense, _MATRIX_BIAS),
    (matmul, _PAIR),
    (bmm, _PAIR),
    (attention, _PAIR),
    (embedding, _MATRIX),
    (layer_norm, _VECTOR),
    (weight_view, _MATRIX),
    (times_weight, _VECTOR),
    *((one, _ONE) for one in (tanh, relu, gelu, sigmoid, silu, exp, sin, square, softmax, older_softmax, clamp)),
    *((one, _ONE) for one in (half, double, mean, total, amax, gather, detach, custom)),
    *((one, _ONE) for one in (transpose, narrow, columns, chunk, split, expand, flatten, unsqueeze, dense_copy)),
    *((one, _PAIR) for one in (add, mul, sub, div, where, cat, branch, copied_into, item_set)),
    (copy_, Spec(ins=2, writes=True)),
    *((one, _DRAWS) for one in (dropout, randn, uniform, python_draws, numpy_draws)),
    *((one, _STATE) for one in (state_counts, state_buffer, batch_norm)),
)
FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function, _ in _TABLE}
SPECS: dict[str, Spec] = {function.__name__: spec for function, spec in _TABLE}
