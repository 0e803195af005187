"""Makes a cell of a program, and calls its spans with us or without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from fuzz.program import Op, Policy, Program, Span, Tensor, spans_of
from mindspore import nn

import hyper_parallel as hp
from hyper_parallel.backends.mindspore import AsyncSaveOnCpu
from hyper_parallel.platform.mindspore import compat

from .operations import FUNCTIONS, NORM_WIDTH, SPECS

__all__ = ["Doors", "Model", "PlannedError", "Tick"]

_MOST_ARGUMENTS = 3  # of a span: so many of the newest visible values


class PlannedError(Exception):
    """An error that the schedule asked for."""


class Tick:
    """Called at every operation: raises where the schedule wants it. Slots: a region would put a count in a dict back."""

    __slots__ = ("in_backward", "left")

    def __init__(self) -> None:
        self.left: int | None = None  # calls until the planned error
        self.in_backward = False  # count the calls of replays instead of those of forward

    def __call__(self) -> None:
        if self.left is None or self.in_backward != (compat.backward_id() is not None):
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise PlannedError


class Doors:
    """How a span runs: with us, or as it stands."""

    def __init__(self, *, are_ours: bool) -> None:
        self.are_ours = are_ours

    def wrapped(self, span: Span, cell: nn.Cell) -> Callable[..., Any]:
        """What a span that is a wrapper calls."""
        if not self.are_ours:
            return cell
        wrapper = hp.swap_wrapper if span.kind == "swap_wrapper" else hp.checkpoint_wrapper
        return wrapper(cell, **_options(span))  # type: ignore[no-any-return]

    def call(self, span: Span, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a span that is no wrapper."""
        if span.kind == "no_grad":
            with compat.no_grad():
                return function(*args, **kwargs)
        if not self.are_ours or span.kind == "plain":
            return function(*args, **kwargs)
        if span.kind == "async_save":
            with AsyncSaveOnCpu():
                return function(*args, **kwargs)
        door = hp.swap if span.kind == "swap" else hp.checkpoint
        return door(function, *args, **_options(span), **kwargs)


def _options(span: Span) -> dict[str, Any]:
    if span.kind.startswith("swap"):
        return {"policy_fn": _TENSOR_POLICIES[span.tensor_policy]}
    policy = None if span.policy is None else _POLICY_FORMS[span.policy.form](span.policy)
    return {"swap_inputs": span.swap_inputs, "policy_fn": policy}


def _function_policy(policy: Policy) -> Any:
    table = dict(policy.table)
    return lambda ctx, op, *args, **kwargs: hp.CheckpointPolicy[table.get(op.name, policy.otherwise)]


def _bools_policy(policy: Policy) -> Any:
    names = {name for name, _ in policy.table}
    return lambda ctx, op, *args, **kwargs: op.name in names


def _list_policy(policy: Policy) -> Any:
    return [name for name, _ in policy.table]


def _cycle_policy(policy: Policy) -> Any:
    answers = [*(answer for _, answer in policy.table), policy.otherwise]
    asked: list[Any] = []

    def answer(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(op.name)
        return hp.CheckpointPolicy[answers[len(asked) % len(answers)]]

    return answer


_POLICY_FORMS = {"function": _function_policy, "bools": _bools_policy, "list": _list_policy, "cycle": _cycle_policy}
_TENSOR_POLICIES: dict[str, Any] = {
    "none": None,
    "save_even": lambda tensor: (
        hp.CheckpointPolicy.MUST_SAVE if tensor.ndim % 2 == 0 else hp.CheckpointPolicy.MUST_SWAP
    ),
    "all_save": lambda tensor: hp.CheckpointPolicy.PREFER_SAVE,
}


class _Owner(nn.Cell):
    """A cell with state, and weights that it shares with the model."""

    def __init__(self, model: Model | None) -> None:
        super().__init__(auto_prefix=False)
        self.counts: list[int] = []
        self.register_buffer("calls", mindspore.Tensor(np.zeros(1, np.float32)))
        self.norm = nn.BatchNorm1d(NORM_WIDTH)
        self.norm.update_parameters_name(f"norm{0 if model is None else len(model.owners)}.")
        for parameter in (self.norm.gamma, self.norm.beta):
            parameter.requires_grad = False

    def state(self) -> list[Any]:
        """What forward changed of it."""
        values = (self.calls, self.norm.moving_mean, self.norm.moving_variance)
        return [tuple(self.counts), *(value.asnumpy().tobytes() for value in values)]


class _SpanCell(_Owner):
    """A span as a cell of its own."""

    def __init__(self, model: Model, span: Span) -> None:
        super().__init__(model)
        model.owners.append(self)
        self.weights = model.weights
        self._run = model.runner(span, self)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def _value(shape: tuple[int, ...], seed: int) -> Any:
    return mindspore.Tensor(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


class Model(_Owner):
    """A program as a cell whose output is its loss."""

    def __init__(self, program: Program, doors: Doors, tick: Tick) -> None:
        super().__init__(None)
        self.program = program
        self.doors = doors
        self.tick = tick
        self.owners: list[_Owner] = [self]
        self.seen: list[Any] = []  # the outputs of the last forward, as arrays
        self.weights = mindspore.ParameterTuple(
            [self._weight(number, weight) for number, weight in enumerate(program.weights)]
        )
        self.constant = _value(program.constants[0].shape, 77)
        self.calls_of = {id(span): self._callable(span) for span in spans_of(program.body)}

    def _weight(self, number: int, weight: Tensor) -> Any:
        value = _value(weight.shape, 500 + number) * 0.5
        return mindspore.Parameter(value, name=f"w{number}", requires_grad=weight.requires_grad)

    def trained(self) -> list[Any]:
        """The weights that have gradients."""
        return [weight for weight in self.weights if weight.requires_grad]

    # ------------------------------------------------------------------ spans

    def _callable(self, span: Span) -> Any:
        is_cell = span.kind.endswith("_wrapper") or span.module == "module"
        if not is_cell:
            return None  # a function of the cell whose construct runs
        cell = _SpanCell(self, span)
        return self.doors.wrapped(span, cell) if span.kind.endswith("_wrapper") else cell

    def runner(self, span: Span, owner: _Owner) -> Callable[..., Any]:
        """A span's body as a function of tensors."""

        def run(*args: Any, **kwargs: Any) -> Any:
            boxes = [arg for arg in args if isinstance(arg, dict)]
            values = list(boxes[0]["values"]) if boxes else [*args, *kwargs.values()]
            count = len(values)
            self.run_body(span.body, values, owner)
            made = values[count:] or values
            outs = [made[-1 - ref % len(made)] for ref in span.outs]
            return {"tuple": tuple, "list": list, "dict": lambda found: dict(enumerate(found))}[span.form](outs)

        return run

    def run_body(self, body: tuple[Op | Span, ...], values: list[Any], owner: _Owner) -> None:
        """Append what every node makes to the visible values."""
        for node in body:
            values.extend(self._op(node, values, owner) if isinstance(node, Op) else self._span(node, values, owner))

    def _op(self, op: Op, values: list[Any], owner: _Owner) -> list[Any]:
        self.tick()
        operands = [values[-1 - ref % len(values)] for ref in op.ins]
        letters = SPECS[op.name].weights
        operands += [owner if letter == "o" else self._chosen(letter, at) for letter, at in zip(letters, op.weights)]
        name = "copied_into" if op.name == "copy_" and not self.program.is_wild else op.name
        made = FUNCTIONS[name](*operands)
        return list(made) if isinstance(made, tuple) else [made]

    def _chosen(self, letter: str, at: int) -> Any:
        weight = self.weights[at % len(self.weights)]
        if letter == "v":
            return weight.reshape(-1)[: weight.shape[-1]]
        return weight if weight.ndim == 2 else weight.reshape(1, -1)

    def _span(self, span: Span, values: list[Any], owner: _Owner) -> list[Any]:
        args = values[-_MOST_ARGUMENTS:]
        made: list[Any] = []
        for _ in range(span.calls):
            made = self._call(span, args, owner)
            args = [*made, *args][: len(args)]
        return made

    def _call(self, span: Span, args: list[Any], owner: _Owner) -> list[Any]:
        function = self.calls_of[id(span)] or self.runner(span, owner)
        called: Callable[..., Any] = function
        if not span.kind.endswith("_wrapper"):

            def called(*args: Any, **kwargs: Any) -> Any:
                return self.doors.call(span, function, *args, **kwargs)

        if span.passing == "kwargs":
            out = called(**{f"a{number}": value for number, value in enumerate(args)})
        elif span.passing == "nested":
            out = called({"values": list(args), "label": "box"})
        else:
            out = called(*args)
        return list(out.values()) if isinstance(out, dict) else list(out)

    # ------------------------------------------------------------------ the cell

    def construct(self, *inputs: Any) -> Any:
        # A wild program writes values in place, and must not write a leaf.
        values = [self.constant, *([value * 1.0 for value in inputs] if self.program.is_wild else inputs)]
        self.run_body(self.program.body, values, self)
        outs = [values[-1 - ref % len(values)] for ref in self.program.outs]
        if compat.backward_id() is None:
            self.seen = [out.asnumpy().copy() for out in outs]
        loss = mindspore.mint.sum(values[-1]) * 0.0
        for index, out in enumerate(outs):
            loss = loss + mindspore.mint.sum(out) * (index + 1)
        return loss
