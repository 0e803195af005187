"""Every case that must hold and that MindSpore can express: schedules first; models and values are in their own files."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import mindspore
from mindspore import nn

from hyper_parallel.platform.mindspore import compat

from . import scenarios_models, scenarios_values  # noqa: F401  entered in the table by being imported
from .kinds import Kind
from .models import Block, Chain, SmoothBlock
from .scenario import SCENARIOS, SECOND_ORDER, Halves, Log, batch, scenario

__all__ = ["SCENARIOS"]


def _chain(kind: Kind, depth: int = 3) -> Chain:
    return Chain([kind.layer(Block()) for _ in range(depth)])


@scenario
def one_step(kind: Kind, log: Log) -> None:
    log.step(kind, _chain(kind), batch())


@scenario
def many_steps(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for seed in range(4):
        gradients = log.step(kind, model, batch(seed=seed))
        for parameter, gradient in zip(model.trainable_params(), gradients[1:]):
            parameter.copy_(parameter - gradient * 0.05)
    log.all("parameter", model.get_parameters())


@scenario
def gradient_accumulation(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    total: list[Any] | None = None
    for seed in range(3):
        gradients = log.step(kind, model, batch(seed=seed), loss=lambda out: mindspore.mint.sin(out).sum())
        total = list(gradients) if total is None else [one + other for one, other in zip(total, gradients)]
    log.all("total", total or ())


def _forwards_then_backwards(kind: Kind, log: Log, order: tuple[int, ...]) -> None:
    halves = Halves(kind, _chain(kind))
    inputs = [batch(seed=seed) for seed in range(len(order))]
    outputs = [halves.forward(x) for x in inputs]
    for index in order:
        log.all("gradient", halves.backward(inputs[index], outputs[index] * 0.25))
    log.all("output", outputs)


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
    halves = Halves(kind, _chain(kind))
    waiting: list[tuple[Any, Any]] = []
    for seed in range(5):
        x = batch(seed=seed)
        waiting.append((x, halves.forward(x)))
        if seed >= 2:
            log.all("gradient", halves.backward(*waiting.pop(0)))
    while waiting:
        log.all("gradient", halves.backward(*waiting.pop(0)))


@scenario
def interleaved_micro_batches_on_two_chunks(kind: Kind, log: Log) -> None:
    """Virtual pipeline stages: each chunk is a graph of its own, joined by gradients that are handed over by hand."""
    first, second = Halves(kind, _chain(kind, 2)), Halves(kind, _chain(kind, 2))
    inputs = [batch(seed=seed) for seed in range(3)]
    middles = [first.forward(x) for x in inputs[:2]]
    joints = [mindspore.Tensor(middle.asnumpy()) for middle in middles]
    outs = [second.forward(joint) for joint in joints]
    handed = second.backward(joints[0], outs[0])
    middles.append(first.forward(inputs[2]))
    log.all("gradient", first.backward(inputs[0], handed[0]))
    joints.append(mindspore.Tensor(middles[2].asnumpy()))
    outs.append(second.forward(joints[2]))
    for index in (1, 2):
        handed = second.backward(joints[index], outs[index])
        log.all("handed", handed)
        log.all("gradient", first.backward(inputs[index], handed[0]))


@scenario
def double_backward(kind: Kind, log: Log) -> None:
    """A gradient penalty."""
    model = Chain([kind.layer(SmoothBlock()) for _ in range(2)])

    def penalised(x: Any) -> Any:
        slope = mindspore.grad(lambda x: kind.forward(model, x).sum())(x)
        return (slope * slope).sum() + kind.forward(model, x).sum()

    log.keep("slope", mindspore.grad(lambda x: kind.forward(model, x).sum())(batch()))
    log.keep("gradient", mindspore.grad(penalised)(batch()))


@scenario
def double_backward_with_the_penalty_alone(kind: Kind, log: Log) -> None:
    model = Chain([kind.layer(SmoothBlock()) for _ in range(2)])

    def penalty(x: Any) -> Any:
        return mindspore.grad(lambda x: mindspore.mint.exp(kind.forward(model, x)).sum())(x).square().mean()

    log.keep("gradient", mindspore.grad(penalty)(batch()))


SECOND_ORDER.update(("double_backward", "double_backward_with_the_penalty_alone"))


@scenario
def grad_of_a_part(kind: Kind, log: Log) -> None:
    """Gradients with respect to a middle value and one parameter, then of the rest."""
    model = _chain(kind)
    middle = model.layers[0](batch())
    weight = [next(iter(model.layers[1].get_parameters()))]

    def rest(middle: Any) -> Any:
        return model.layers[2](model.layers[1](middle))

    gradients = log.step(kind, rest, middle, model=weight)
    log.step(kind, model.layers[0], batch(), loss=lambda out: (out * gradients[0]).sum())


@scenario
def grad_of_an_output_row(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for row in range(2):
        log.step(kind, model, batch(), loss=lambda out, row=row: out[row].sum())


@scenario
def forward_without_backward_then_a_step(kind: Kind, log: Log) -> None:
    """Graphs that are recorded and never used."""
    model = _chain(kind)
    halves = Halves(kind, model)
    for seed in range(2):
        log.keep("output", halves.forward(batch(seed=seed)))
    model.set_grad(False)
    compat.end_failed_gradient()  # MindSpore keeps graphs that nobody takes
    log.step(kind, model, batch())


@scenario
def no_grad_and_eval_between(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    halves = Halves(kind, model)
    x = batch()
    out = halves.forward(x)
    with mindspore._no_grad():
        log.keep("no_grad", kind.forward(model, batch(seed=2)))
    model.set_train(False)
    with mindspore._no_grad():
        log.keep("eval", kind.forward(model, batch(seed=3)))
    model.set_train()
    log.all("gradient", halves.backward(x, out))


class _Fault(RuntimeError):
    """What the exceptions below raise."""


class _Faulty(nn.Cell):
    """A block that raises where it is told to, until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.where: str | None = None

    def construct(self, x: Any) -> Any:
        if self.where == "forward":
            raise _Fault("told to")
        is_replay = compat.backward_id() is not None
        if self.where == "recompute" and is_replay:
            raise _Fault("told to")
        out = self.block(x)
        if self.where == "backward" and not is_replay:
            out.register_hook(_raise)
        return out


def _raise(gradient: Any) -> None:
    raise _Fault("told to")


def _exception_then_a_step(kind: Kind, log: Log, where: str) -> None:
    faulty = _Faulty()
    model = Chain([kind.layer(Block()), kind.layer(faulty), kind.layer(Block())])
    faulty.where = where
    with contextlib.suppress(_Fault):
        Log().step(kind, model, batch())
    compat.end_failed_gradient()
    faulty.where = None
    for seed in range(2):
        log.step(kind, model, batch(seed=seed))


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
def two_models_in_turn(kind: Kind, log: Log) -> None:
    one, two = _chain(kind, 2), _chain(kind, 2)
    weights = [*one.trainable_params(), *two.trainable_params()]

    def both(x: Any) -> Any:
        second = two(x)
        return one(x) + one(second)

    log.step(kind, both, batch(), model=weights)
    first, second = Halves(kind, one), Halves(kind, two)
    x, y = batch(seed=2), batch(seed=3)
    outs = first.forward(x), second.forward(y)
    log.all("gradient", first.backward(x, outs[0]))
    log.all("gradient", second.backward(y, outs[1]))


@scenario
def teacher_is_a_deepcopy(kind: Kind, log: Log) -> None:
    """An EMA teacher that runs between the student's forward and backward, and follows it."""
    student = _chain(kind)
    teacher = copy.deepcopy(student)
    for seed in range(2):
        x = batch(seed=seed)

        def distil(x: Any) -> Any:
            out = student(x)
            with mindspore._no_grad():
                target = kind.forward(teacher, x)
            return out - target - 1

        gradients = log.step(kind, distil, x, model=student)
        for mine, theirs, gradient in zip(teacher.get_parameters(), student.get_parameters(), gradients[1:]):
            theirs.copy_(theirs - gradient * 0.1)
            mine.copy_(mine * 0.5 + theirs * 0.5)
    log.all("student", student.get_parameters())
    log.all("teacher", teacher.get_parameters())


@scenario
def both_copies_train(kind: Kind, log: Log) -> None:
    one = _chain(kind)
    log.step(kind, one, batch())
    two = copy.deepcopy(one)
    weights = [*one.trainable_params(), *two.trainable_params()]
    log.step(kind, lambda x: two(one(x)), batch(seed=2), model=weights)


@scenario
def model_deleted_and_rebuilt(kind: Kind, log: Log) -> None:
    for _ in range(3):
        model: Any = _chain(kind, 2)
        log.step(kind, model, batch())
        del model


@scenario
def shapes_change_every_step(kind: Kind, log: Log) -> None:
    model = _chain(kind)
    for rows in (4, 1, 7, 3, 4):
        log.step(kind, model, batch(rows), loss=lambda out: out.square().sum())
