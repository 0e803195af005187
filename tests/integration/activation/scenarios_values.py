"""Scenarios about the values themselves: changed in place, random, cast, frozen, tiny, empty, strange."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .kinds import Kind
from .models import WIDTH, Block, Chain, DropoutBlock, InPlaceBlock, LowRank, NormBlock
from .scenario import MAY_REFUSE, Log, batch, scenario

__all__: list[str] = []


def _steps(kind: Kind, log: Log, model: nn.Module, forward: Any = None, *, count: int = 2) -> None:
    for seed in range(count):
        x = batch(seed=seed)
        out = kind.forward(forward if forward is not None else model, x)
        out.float().pow(2).mean().backward()
        log.keep("output", out)
        log.keep("input", x.grad)
    log.model(model)


@scenario
def in_place_inside_a_layer(kind: Kind, log: Log) -> None:
    _steps(kind, log, Chain([kind.layer(InPlaceBlock()) for _ in range(3)]))


@scenario
def in_place_inside_a_layer_used_twice(kind: Kind, log: Log) -> None:
    model, x = Chain([kind.layer(InPlaceBlock()) for _ in range(2)]), batch()
    loss = kind.forward(model, x).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def in_place_residual_add_on_an_output(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(nn.Linear(WIDTH, WIDTH)) for _ in range(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            out = layer(x)
            out += x
            x = out
        return x

    _steps(kind, log, model, forward)


MAY_REFUSE.add("in_place_residual_add_on_an_output")


@scenario
def in_place_activation_on_an_output(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(nn.Linear(WIDTH, WIDTH)) for _ in range(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = F.relu_(layer(x)).clone()
            x = x.mul_(0.5)
        return x

    _steps(kind, log, model, forward)


MAY_REFUSE.add("in_place_activation_on_an_output")


@scenario
def in_place_on_a_view_of_an_output(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
            x[:, : WIDTH // 2].tanh_()
        return x

    _steps(kind, log, model, forward)


MAY_REFUSE.add("in_place_on_a_view_of_an_output")


class _WritesIntoABuffer(nn.Module):
    """Fills a fresh tensor slice by slice, then normalises it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[:, : WIDTH // 2] = self.linear(x)[:, : WIDTH // 2]
        out[:, WIDTH // 2 :].copy_(x[:, : WIDTH // 2].sin())
        h = self.linear(out)
        h.sub_(h.detach().mean())
        h.add_(x).sigmoid_()
        return h * x


@scenario
def writes_into_fresh_tensors(kind: Kind, log: Log) -> None:
    _steps(kind, log, Chain([kind.layer(_WritesIntoABuffer()) for _ in range(2)]))


@scenario
def dropout(kind: Kind, log: Log) -> None:
    _steps(kind, log, Chain([kind.layer(DropoutBlock()) for _ in range(3)]), count=3)
    log.keep("next number", torch.rand(1))


@scenario
def dropout_with_retained_graph(kind: Kind, log: Log) -> None:
    model, x = Chain([kind.layer(DropoutBlock()) for _ in range(2)]), batch()
    loss = kind.forward(model, x).pow(2).mean()
    loss.backward(retain_graph=True)
    log.keep("between", torch.rand(1))
    loss.backward()
    log.keep("input", x.grad)
    log.keep("next number", torch.rand(1))
    log.model(model)


@scenario
def autocast(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    _steps(kind, log, model, forward)


@scenario
def bfloat16(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(3)]).to(torch.bfloat16)
    _steps(kind, log, model, lambda x: model(x.to(torch.bfloat16)))


@scenario
def double_and_complex(kind: Kind, log: Log) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        wave = torch.fft.fft(x.double())
        return (wave * wave.conj()).real.sqrt() + (wave.conj() * 2).imag.sin()

    layer = kind.layer(function)
    x = batch()
    out = kind.forward(lambda x: layer(layer(x)), x)
    out.sum().backward()
    log.keep("output", out)
    log.keep("input", x.grad)


@scenario
def frozen_layers(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(Block()) for _ in range(4)])
    for index in (0, 2):
        model.layers[index].requires_grad_(False)
    _steps(kind, log, model)


@scenario
def low_rank_adapters(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(LowRank()) for _ in range(3)])
    x = batch(grad=False)
    kind.forward(model, x).pow(2).mean().backward()
    log.model(model)


@scenario
def batch_norm_buffers(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(NormBlock()) for _ in range(2)])
    first = kind.forward(model, batch(seed=1)).pow(2).mean()
    second = kind.forward(model, batch(seed=2)).pow(2).mean()
    first.backward()
    second.backward()
    log.model(model)


@scenario
def empty_and_single_elements(kind: Kind, log: Log) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.exp() * y).sum() * y.sum().sin() + (x.tanh() @ x.t()).sum()

    layer = kind.layer(function)
    for shape in ((0, 3), (1, 1), (3, 0), (1, 3)):
        x = batch(*shape)
        y = torch.tensor(0.5, requires_grad=True)
        out = kind.forward(layer, x, y)
        out.backward()
        log.keep("output", out)
        log.keep("input", x.grad)
        log.keep("scalar", y.grad)


class _Strange(nn.Module):
    """Expanded, strided, overlapping, sliced, permuted, boolean and integer values, all saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.exp()
        strided = wide[:, ::2]
        overlapping = wide.reshape(-1).as_strided((4, 6), (1, 2), 3)
        expanded = x.mean(0, keepdim=True).cos().expand(6, WIDTH)
        turned = (x @ self.weight).sin().t()
        chosen = torch.where(x > 0, wide, turned.t()) * self.table(torch.tensor([0, 4, 4, 1])[: x.shape[0]])
        scores = chosen.masked_fill(x.abs() > 1, 0.0).gather(1, (x > 0).long())
        return scores * strided.mean() + (overlapping * overlapping.flip(0)).sum() + (expanded * expanded.exp()).sum()


@scenario
def strange_strides_and_types(kind: Kind, log: Log) -> None:
    _steps(kind, log, Chain([kind.layer(_Strange()) for _ in range(2)]))


class _Multiply(torch.autograd.Function):
    """A function of the user's that saves an input, an output and something else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y, x * y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, product = ctx.saved_tensors
        return grad * y + 0 * product, grad * x


@scenario
def functions_of_the_users(kind: Kind, log: Log) -> None:
    layer = kind.layer(lambda x: _Multiply.apply(x.sin(), _Multiply.apply(x, x.cos())))
    _steps(kind, log, nn.ModuleList(), lambda x: layer(layer(x)))


@scenario
def sparse_values(kind: Kind, log: Log) -> None:
    weight = nn.Parameter(batch(WIDTH, seed=4).detach())
    sparse = torch.eye(4).to_sparse()
    layer = kind.layer(lambda x: torch.sparse.mm(sparse, (x @ weight)).tanh())
    if kind.name in ("all_swapped", "checkpoint_in_checkpoint"):
        layer = lambda x: torch.sparse.mm(sparse, (x @ weight)).tanh()  # noqa: E731  refused there; see failure B8
    x = batch()
    out = kind.forward(lambda x: layer(layer(x)), x)
    out.pow(2).sum().backward()
    log.keep("output", out)
    log.keep("input", x.grad)
    log.keep("weight", weight.grad)


@scenario
def values_the_user_keeps(kind: Kind, log: Log) -> None:
    """Everything a user may hold on to while bytes leave: outputs, inputs, middles; read after forward and after backward."""
    model = Chain([kind.layer(Block()) for _ in range(3)])
    held: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: held.extend((args[0], out)))
    x = batch()
    loss = kind.forward(model, x).pow(2).mean()
    first = [value.detach().clone() for value in held]
    log.keep("inside", torch.stack(first[:6]))
    loss.backward()
    log.keep("inside, after backward", torch.stack([value.detach() for value in held[:6]]))
    log.keep("batch", x)
    log.model(model)


@scenario
def saved_values_looked_at_outside_backward(kind: Kind, log: Log) -> None:
    layer, x = kind.layer(lambda x: x.sin().exp()), batch()
    out = kind.forward(layer, x)
    node = out.grad_fn
    for _ in range(2):
        log.keep("result", node._saved_result)
    out.sum().backward()
    log.keep("input", x.grad)


@scenario
def backward_on_another_thread(kind: Kind, log: Log) -> None:
    model, x = Chain([kind.layer(Block()) for _ in range(3)]), batch()
    loss = kind.forward(model, x).pow(2).mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    log.keep("input", x.grad)
    log.model(model)
