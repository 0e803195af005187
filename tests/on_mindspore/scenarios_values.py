"""Scenarios about the values themselves: changed in place, random, cast, frozen, tiny, empty, strange."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import mint, nn, ops

from hyper_parallel.platform.mindspore import compat

from .kinds import Kind
from .models import WIDTH, Block, Chain, DropoutBlock, InPlaceBlock, LowRank, NormBlock
from .scenario import DRAWS, MAY_REFUSE, Log, batch, scenario

__all__: list[str] = []


@scenario
def in_place_inside_a_layer(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(InPlaceBlock()) for _ in range(3)])
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))


@scenario
def in_place_residual_add_on_an_output(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(mint.nn.Linear(WIDTH, WIDTH)) for _ in range(3)])

    def forward(x: Any) -> Any:
        for layer in model.layers:
            out = layer(x)
            out.copy_(out + x)
            x = out
        return x

    log.step(kind, forward, batch(), model=model)


MAY_REFUSE.add("in_place_residual_add_on_an_output")


class _WritesIntoABuffer(nn.Cell):
    """Fills a fresh tensor, then changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = mint.nn.Linear(WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        out = mint.zeros(x.shape)
        out.copy_(mint.sin(x))
        h = self.linear(out)
        h.copy_(h - ops.stop_gradient(h).mean())
        return mint.sigmoid(h + x) * x


@scenario
def writes_into_fresh_tensors(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(_WritesIntoABuffer()) for _ in range(2)])
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))


@scenario
def dropout(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(DropoutBlock()) for _ in range(3)])
    for seed in range(3):
        log.step(kind, model, batch(seed=seed))
    log.keep("next number", ops.randn(1))


DRAWS.add("dropout")


@scenario
def autocast(kind: Kind, log: Log) -> None:
    """MindSpore's own way: cells that compute in another dtype."""
    model = Chain([kind.layer(Block().to_float(mindspore.float16)) for _ in range(3)])
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))


@scenario
def bfloat16(kind: Kind, log: Log) -> None:
    """What bfloat16 can do on the CPU: storage, sums and products."""

    def function(x: Any) -> Any:
        half = x.to(mindspore.bfloat16)
        return (half * half + half).to(mindspore.float32)

    layer = kind.layer(function)
    log.step(kind, lambda x: layer(layer(x)), batch(), model=[])


@scenario
def double_and_complex(kind: Kind, log: Log) -> None:
    def function(x: Any) -> Any:
        wave = ops.fft(x.to(mindspore.float64))
        return (mint.sin(ops.real(wave)) * ops.imag(wave)).to(mindspore.float32) * 0.1

    layer = kind.layer(function)
    log.step(kind, lambda x: layer(layer(x)), batch(), model=[])


@scenario
def frozen_layers(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    for index in (0, 2):
        for parameter in model.layers[index].get_parameters():
            parameter.requires_grad = False
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))


@scenario
def low_rank_adapters(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(LowRank()) for _ in range(3)])
    log.step(kind, model, batch(), of_inputs=False)


@scenario
def batch_norm_buffers(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(NormBlock()) for _ in range(2)])
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))
    log.all("statistics", (value for name, value in model.parameters_and_names() if "moving" in name))


@scenario
def empty_and_single_elements(kind: Kind, log: Log) -> None:
    """Nothing is summed over 0 elements: on the CPU MindSpore leaves that sum unwritten."""

    def function(x: Any, y: Any) -> Any:
        return mint.cat((mint.exp(x) * mint.tanh(x), mint.sin(y) * y), 0)

    layer = kind.layer(function)
    for shape in ((0, 3), (1, 1), (1, 3), (3, 1)):
        log.step(kind, layer, batch(*shape), batch(1, shape[1]), model=[])


class _Strange(nn.Cell):
    """Expanded, strided, sliced, permuted, boolean and integer values, all saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mindspore.Parameter(batch(WIDTH, seed=7), name="weight")
        self.table = nn.Embedding(5, WIDTH)

    def construct(self, x: Any) -> Any:
        wide = mint.exp(x)
        strided = wide[:, ::2]
        middle = wide[1:3]
        expanded = mint.cos(x.mean(0, keep_dims=True)).broadcast_to((6, WIDTH))
        turned = mint.sin(mint.matmul(x, self.weight)).T
        rows = mindspore.Tensor(np.array([0, 4, 4, 1], np.int32))
        chosen = mint.where(x > 0, wide, turned.T) * self.table(rows)
        scores = ops.masked_fill(chosen, x.abs() > 1, 0.0)
        return scores * strided.mean() + (middle * middle).sum() + (expanded * mint.exp(expanded)).sum()


@scenario
def strange_strides_and_types(kind: Kind, log: Log) -> None:
    log.step(kind, Chain([kind.layer(_Strange()) for _ in range(2)]), batch())


class _Multiply(compat.Function):
    """A function of the user's that saves an input, an output and something else."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y, x * y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, y, product = ctx.saved_tensors
        return gradient * y + 0 * product, gradient * x


@scenario
def functions_of_the_users(kind: Kind, log: Log) -> None:
    layer = kind.layer(lambda x: _Multiply.apply(mint.sin(x), _Multiply.apply(x, mint.cos(x))))
    log.step(kind, lambda x: layer(layer(x)), batch(), model=[])


@scenario
def values_the_user_keeps(kind: Kind, log: Log) -> None:
    """Everything a user may hold on to while bytes leave: outputs, inputs; read after forward and after backward."""
    model = Chain([kind.layer(Block()) for _ in range(3)])
    held: list[Any] = []

    def keep(cell: Any, args: Any, out: Any) -> None:
        held.extend((args[0], out))

    for layer in model.layers:
        layer.register_forward_hook(keep)
    seen: list[Any] = []

    def loss(out: Any) -> Any:
        with mindspore._no_grad():
            seen.extend(np.array(value.asnumpy(), copy=True) for value in held[:6])
        return out.square().mean()

    x = batch()
    log.step(kind, model, x, loss=loss)
    log.all("inside", seen)
    log.all("inside, after backward", held[:6])
    log.keep("batch", x)
