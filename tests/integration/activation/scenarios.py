"""Every case that must hold, as a scenario: schedules first; shapes of models and values are in their own files."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from . import scenarios_models, scenarios_values  # noqa: F401  entered in the table by being imported
from .kinds import Kind
from .models import Block, Chain
from .scenario import SCENARIOS, Log, batch, scenario

__all__ = ["SCENARIOS"]


def _chain(kind: Kind, depth: int = 3) -> Chain:
    return Chain([kind.layer(Block()) for _ in range(depth)])


@scenario
def one_step(kind: Kind, log: Log) -> None:
    model, x = _chain(kind), batch()
    loss = kind.forward(model, x).pow(2).mean()
    loss.backward()
    log.keep("loss", loss)
    log.keep("input", x.grad)
    log.model(model)


@scenario
def many_steps(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss = kind.forward(model, batch(seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        log.keep("loss", loss)
    log.model(model)


@scenario
def gradient_accumulation(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for seed in range(3):
        x = batch(seed=seed)
        kind.forward(model, x).sin().sum().backward()
        log.keep("input", x.grad)
    log.model(model)


def _forwards_then_backwards(kind: Kind, log: Log, order: tuple[int, ...]) -> None:
    model = _chain(kind)
    inputs = [batch(seed=seed) for seed in range(len(order))]
    losses = [kind.forward(model, x).pow(2).mean() for x in inputs]
    for index in order:
        losses[index].backward()
    for x in inputs:
        log.keep("input", x.grad)
    log.model(model)


@scenario
def two_forwards_two_backwards(kind: Kind, log: Log) -> None:
    _forwards_then_backwards(kind, log, (0, 1))


@scenario
def two_forwards_two_backwards_in_the_other_order(kind: Kind, log: Log) -> None:
    _forwards_then_backwards(kind, log, (1, 0))


@scenario
def five_forwards_backwards_in_any_order(kind: Kind, log: Log) -> None:
    _forwards_then_backwards(kind, log, (3, 0, 4, 1, 2))


@scenario
def one_forward_one_backward(kind: Kind, log: Log) -> None:
    """The steady state of a pipeline stage: warm up by two, then alternate, then drain."""
    model = _chain(kind)
    waiting: list[torch.Tensor] = []
    for seed in range(6):
        waiting.append(kind.forward(model, batch(seed=seed)).pow(2).mean())
        if seed >= 2:
            waiting.pop(0).backward()
    while waiting:
        waiting.pop(0).backward()
    log.model(model)


@scenario
def interleaved_micro_batches_on_two_chunks(kind: Kind, log: Log) -> None:
    """Virtual pipeline stages: each chunk is a graph of its own, joined by gradients that are handed over by hand."""
    chunks = nn.ModuleList([_chain(kind, 2), _chain(kind, 2)])
    heads: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    tails: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def first(seed: int) -> None:
        x = batch(seed=seed)
        heads[seed] = (x, kind.forward(chunks[0], x))

    def second(seed: int) -> None:
        joint = heads[seed][1].detach().requires_grad_()
        tails[seed] = (joint, kind.forward(chunks[1], joint).pow(2).mean())

    def back_second(seed: int) -> None:
        tails[seed][1].backward()

    def back_first(seed: int) -> None:
        x, out = heads.pop(seed)
        out.backward(tails.pop(seed)[0].grad)
        log.keep("input", x.grad)

    first(0), first(1), second(0), second(1), first(2), back_second(0), first(3), back_second(1)
    second(2), back_first(0), second(3), back_first(1), back_second(2), back_second(3), back_first(2), back_first(3)
    log.model(chunks)


@scenario
def backward_twice_with_retain_graph(kind: Kind, log: Log) -> None:
    model, x = _chain(kind), batch()
    loss = kind.forward(model, x).pow(2).mean()
    for keeps in (True, True, False):
        loss.backward(retain_graph=keeps)
        log.keep("input", x.grad)
    log.model(model)


@scenario
def double_backward(kind: Kind, log: Log) -> None:
    """A gradient penalty."""
    model, x = _chain(kind), batch()
    out = kind.forward(model, x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + (slope.norm() - 1) ** 2).backward()
    log.keep("slope", slope)
    log.keep("input", x.grad)
    log.model(model)


@scenario
def double_backward_with_the_penalty_alone(kind: Kind, log: Log) -> None:
    model, x = _chain(kind, 2), batch()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return slope.pow(2).mean()

    kind.forward(penalty, x).backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def grad_of_a_part(kind: Kind, log: Log) -> None:
    """Gradients with respect to a middle value and one parameter, then of the rest."""
    model, x = _chain(kind), batch()

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = model.layers[0](x)
        return middle, model.layers[2](model.layers[1](middle)).pow(2).mean()

    middle, loss = kind.forward(forward, x)
    weight = next(iter(model.layers[1].parameters()))
    of_middle, of_weight = torch.autograd.grad(loss, (middle, weight), retain_graph=True)
    log.keep("middle", of_middle)
    log.keep("weight", of_weight)
    middle.backward(of_middle)
    log.keep("input", x.grad)
    log.model(model)


@scenario
def grad_of_an_output_row(kind: Kind, log: Log) -> None:
    model, x = _chain(kind), batch()
    out = kind.forward(model, x)
    for row in range(2):
        log.keep("row", torch.autograd.grad(out[row].sum(), x, retain_graph=True)[0])
    out.mean().backward()
    log.model(model)


@scenario
def forward_without_backward_then_a_step(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for seed in range(3):
        log.keep("output", kind.forward(model, batch(seed=seed)))
    held = kind.forward(model, batch(seed=9))
    kind.forward(model, batch()).pow(2).mean().backward()
    log.keep("held", held)
    log.model(model)


@scenario
def no_grad_and_eval_between(kind: Kind, log: Log) -> None:
    model, x = _chain(kind), batch()
    loss = kind.forward(model, x).pow(2).mean()
    with torch.no_grad():
        log.keep("no_grad", kind.forward(model, batch(seed=2)))
    model.eval()
    log.keep("eval", kind.forward(model, batch(seed=3)))
    with torch.inference_mode():
        log.keep("inference", kind.forward(model, batch(seed=4, grad=False)))
    model.train()
    loss.backward()
    log.keep("input", x.grad)
    log.model(model)


class _Fault(RuntimeError):
    """What the exceptions below raise."""


class _Faulty(nn.Module):
    """A block that raises where it is told to, until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.where: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise _Fault("told to")
        is_replay = torch._C._current_graph_task_id() != -1
        if self.where == "recompute" and is_replay:
            raise _Fault("told to")
        out = self.block(x)
        if self.where == "backward" and not is_replay:
            out.register_hook(self._raise)
        return out

    @staticmethod
    def _raise(gradient: torch.Tensor) -> None:
        raise _Fault("told to")


def _exception_then_a_step(kind: Kind, log: Log, where: str) -> None:
    faulty = _Faulty()
    model = Chain([kind.layer(Block()), kind.layer(faulty), kind.layer(Block())])
    x = batch()
    faulty.where = where
    with contextlib.suppress(_Fault):
        kind.forward(model, x).pow(2).mean().backward()
    faulty.where = None
    for seed in range(2):
        model.zero_grad()
        x = batch(seed=seed)
        kind.forward(model, x).pow(2).mean().backward()
        log.keep("input", x.grad)
        log.model(model)


@scenario
def exception_in_forward_then_a_step(kind: Kind, log: Log) -> None:
    _exception_then_a_step(kind, log, "forward")


@scenario
def exception_in_backward_then_a_step(kind: Kind, log: Log) -> None:
    _exception_then_a_step(kind, log, "backward")


@scenario
def exception_in_recompute_then_a_step(kind: Kind, log: Log) -> None:
    _exception_then_a_step(kind, log, "recompute")


@scenario
def exception_in_backward_then_the_same_backward(kind: Kind, log: Log) -> None:
    """A retained graph is used again after a backward that raised in its middle."""
    model, x = _chain(kind), batch()
    armed = [True]

    def forward(x: torch.Tensor) -> torch.Tensor:
        middle = model.layers[1](model.layers[0](x))
        middle.register_hook(raise_once)
        return model.layers[2](middle).pow(2).mean()

    def raise_once(gradient: torch.Tensor) -> None:
        if armed[0]:
            armed[0] = False
            raise _Fault("told to")

    loss = kind.forward(forward, x)
    with contextlib.suppress(_Fault):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def exception_in_recompute_then_the_same_backward(kind: Kind, log: Log) -> None:
    faulty = _Faulty()
    model = Chain([kind.layer(Block()), kind.layer(faulty), kind.layer(Block())])
    x = batch()
    loss = kind.forward(model, x).pow(2).mean()
    faulty.where = "recompute"
    with contextlib.suppress(_Fault):
        loss.backward(retain_graph=True)
    faulty.where = None
    model.zero_grad()
    x.grad = None
    loss.backward()
    log.keep("input", x.grad)
    log.model(model)


@scenario
def two_models_in_turn(kind: Kind, log: Log) -> None:
    one, two = _chain(kind, 2), _chain(kind, 2)
    x = batch()
    first, second = kind.forward(one, x), kind.forward(two, x)
    third = kind.forward(one, second)
    first.sum().backward()
    third.pow(2).mean().backward()
    log.keep("input", x.grad)
    log.model(one)
    log.model(two)


@scenario
def teacher_is_a_deepcopy(kind: Kind, log: Log) -> None:
    """An EMA teacher that runs between the student's forward and backward, and follows it."""
    student = _chain(kind)
    teacher = copy.deepcopy(student)
    for seed in range(3):
        student.zero_grad()
        out = kind.forward(student, batch(seed=seed))
        with torch.no_grad():
            target = kind.forward(teacher, batch(seed=seed))
        loss = (out - target - 1).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters()):
                theirs.sub_(theirs.grad, alpha=0.1)
                mine.lerp_(theirs, 0.5)
        log.keep("loss", loss)
    log.model(student)
    log.model(teacher)


@scenario
def both_copies_train(kind: Kind, log: Log) -> None:
    one = _chain(kind)
    x = batch()
    first = kind.forward(one, x)
    two = copy.deepcopy(one)
    second = kind.forward(two, x)
    second.sum().backward()
    first.pow(2).sum().backward()
    log.keep("input", x.grad)
    log.model(one)
    log.model(two)


@scenario
def model_deleted_and_rebuilt(kind: Kind, log: Log) -> None:
    for _ in range(3):
        model: Any = _chain(kind, 2)
        kind.forward(model, batch()).pow(2).mean().backward()
        log.model(model)
        unused = kind.forward(model, batch(seed=3))
        del model, unused


@scenario
def shapes_change_every_step(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for rows in (4, 1, 7, 0, 3, 4):
        model.zero_grad()
        x = batch(rows)
        kind.forward(model, x).pow(2).sum().backward()
        log.keep("input", x.grad)
        log.model(model)
