"""The records that the print shop reads, as it sees them. ``planner.run`` has the ones that are written and loaded.

Structural, as ``trace.TraceSpan`` is: this room prints what it is given and needs no other room to do so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = [
    "Curve",
    "Fate",
    "Forecast",
    "Op",
    "Run",
    "Span",
    "Step",
    "Versions",
    "are_gradients_equal",
    "budget_line",
]


class Word(Protocol):
    """A member of an enumeration."""

    @property
    def value(self) -> str: ...


class Versions(Protocol):
    """Where and with what something ran."""

    # ruff: noqa: D102
    @property
    def framework(self) -> str: ...
    @property
    def framework_version(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def library_version(self) -> str: ...
    @property
    def python_version(self) -> str: ...


class Curve(Protocol):
    """Memory over the step."""

    @property
    def times_us(self) -> Sequence[float]: ...
    @property
    def nbytes(self) -> Sequence[int]: ...


class Span(Protocol):
    """Something that took time."""

    @property
    def track(self) -> Word: ...
    @property
    def name(self) -> str: ...
    @property
    def start_us(self) -> float: ...
    @property
    def end_us(self) -> float: ...
    @property
    def nbytes(self) -> int: ...


class Fate(Protocol):
    """Bytes of one fate and one reason."""

    @property
    def fate(self) -> Word: ...
    @property
    def reason(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Op(Protocol):
    """All instances of one op, by what becomes of their outputs."""

    @property
    def op(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def recomputed_bytes(self) -> int: ...
    @property
    def swapped_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def reason(self) -> str: ...


class Forecast(Protocol):
    """What a plan said before."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def swapped_out_bytes(self) -> int: ...


class Step(Protocol):
    """The step, run one way."""

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def process_bytes(self) -> int: ...
    @property
    def model_peak_bytes(self) -> int: ...
    @property
    def peak_where(self) -> str: ...
    @property
    def peak_parts(self) -> Mapping[str, int]: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def out_bytes(self) -> int: ...
    @property
    def back_bytes(self) -> int: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def gradients(self) -> str: ...
    @property
    def memory(self) -> Curve: ...
    @property
    def spans(self) -> Sequence[Span]: ...
    @property
    def fates(self) -> Sequence[Fate]: ...
    @property
    def ops(self) -> Sequence[Op]: ...
    @property
    def forecast(self) -> Forecast | None: ...
    @property
    def notes(self) -> Sequence[str]: ...


class Run(Protocol):
    """One run: a machine, a model, and its step in one or several ways."""

    @property
    def title(self) -> str: ...
    @property
    def created(self) -> str: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def memory_kind(self) -> str: ...
    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def settings(self) -> Mapping[str, str]: ...
    @property
    def machine(self) -> Mapping[str, str]: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def notes(self) -> Sequence[str]: ...


def budget_line(run: Run) -> int | None:
    """Where the budget lies among whole-process peaks: what the process holds anyway is beneath it."""
    return None if run.budget_bytes is None else run.budget_bytes + run.steps[-1].process_bytes


def are_gradients_equal(run: Run, step: Step) -> bool | None:
    """Whether a way of running gave the first one's gradients, bit for bit; None: nobody looked."""
    first = run.steps[0]
    return step.gradients == first.gradients if step.gradients and first.gradients else None
