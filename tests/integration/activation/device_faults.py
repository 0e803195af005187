"""Run a program on a simulated device that ignores one wait, one event or one hold, and say whether that was noticed."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

import hyper_parallel as hp
from hyper_parallel.errors import CorruptDataError
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream
from hyper_parallel.testing import SimulationError, simulated_accelerator

__all__ = ["FAULTS", "Call", "Outcome", "Program", "calls_of", "run", "skip"]

FAULTS = ("wait", "event", "hold")


@dataclasses.dataclass(frozen=True)
class Program:
    """A step that swaps. ``steps(sim)`` gives tensors to compare; ``sim`` is None for the plain run of the same step."""

    name: str
    steps: Callable[[Simulation | None], list[torch.Tensor]]
    settings: dict[str, Any]
    faults: tuple[str, ...] = FAULTS


@dataclasses.dataclass(frozen=True)
class Call:
    """One wait, event or hold of the engine in one run of a program."""

    number: int
    name: str  # the engine's functions that asked for it, and the streams
    is_idle: bool
    """A wait whose stream is after the event already; an event that the host never looks at and only idle waits name."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run with one fault came to."""

    values: tuple[torch.Tensor, ...] | None  # None: the program ended by an error
    violations: tuple[str, ...]
    error: BaseException | None

    def is_noticed(self, expected: list[torch.Tensor]) -> bool:
        """Whether the judge or the values say that something was wrong."""
        if self.violations or isinstance(self.error, SimulationError | CorruptDataError):
            return True
        return self.values is not None and not _are_equal(list(self.values), expected)


def run(program: Program, arm: Callable[[Simulation], None] = lambda sim: None) -> Outcome:
    """The program on a device that ``arm`` has prepared."""
    hp.SwapManager().reset()
    values: list[torch.Tensor] | None = None
    error: BaseException | None = None
    simulation: Simulation | None = None
    try:
        with simulated_accelerator(**program.settings) as simulation:
            arm(simulation)
            values = program.steps(simulation)
    except Exception as raised:  # whatever a broken device leads to
        error = raised.with_traceback(None)
    assert simulation is not None
    return Outcome(None if values is None else tuple(values), tuple(simulation.violations), error)


def skip(fault: str, *numbers: int) -> Callable[[Simulation], None]:
    """Arms a device to ignore these calls."""

    def arm(simulation: Simulation) -> None:
        if fault == "wait":
            simulation.timeline.skip_waits = numbers
        elif fault == "event":
            simulation.timeline.skip_events = numbers
        else:
            simulation.skip_holds = numbers

    return arm


class _Notes:
    """Writes down what the engine asks of a simulated device."""

    def __init__(self) -> None:
        self.is_over = False
        self.calls: dict[str, list[Call]] = {fault: [] for fault in FAULTS}
        self._seen: collections.Counter[str] = collections.Counter()
        self._needed_events: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._kept: list[SimulatedEvent] = []  # so that the id of an event stays its own

    def arm(self, simulation: Simulation) -> None:
        """Listen to a device."""
        timeline, manager = simulation.timeline, hp.SwapManager()
        wait, synchronize, record, trace = timeline.wait, timeline.synchronize, timeline.record, simulation.trace
        is_done = timeline.is_done

        def noted_wait(stream: SimulatedStream, event: SimulatedEvent) -> None:
            self._note_wait(timeline.num_waits, stream.name, stream.clock, event)
            wait(stream, event)

        def noted_synchronize(event: SimulatedEvent) -> None:
            self._note_wait(timeline.num_waits, "host", timeline._host_clock, event)
            synchronize(event)

        def noted_record(stream: SimulatedStream) -> SimulatedEvent:
            self._note("event", timeline.num_events, stream.name)
            event = record(stream)
            self._numbers[id(event)] = timeline.num_events - 1
            self._kept.append(event)
            return event

        def noted_is_done(event: SimulatedEvent) -> bool:
            self._needed_events.add(self._numbers.get(id(event), -1))
            return is_done(event)

        def noted_trace(what: str, record: Any) -> None:
            if what in ("offload", "load"):
                self._note("hold", simulation.num_holds, what)
            trace(what, record)

        timeline.__dict__.update(
            wait=noted_wait, synchronize=noted_synchronize, record=noted_record, is_done=noted_is_done
        )
        manager.counters.trace = noted_trace

    def _note_wait(self, number: int, stream: str, clock: Mapping[str, int], event: SimulatedEvent) -> None:
        is_idle = all(clock.get(name, -1) >= time for name, time in event.clock.items())
        if not is_idle:
            self._needed_events.add(self._numbers.get(id(event), -1))
        self._note("wait", number, f"{stream} for {event.stream.name}", is_idle=is_idle)

    def _note(self, fault: str, number: int, streams: str, *, is_idle: bool = False) -> None:
        place = _place(sys._getframe(2))
        if place is None or self.is_over:
            return
        name = f"{fault}: {place}: {streams}"
        self.calls[fault].append(Call(number, f"{name} #{self._seen[name]}", is_idle))
        self._seen[name] += 1

    def close(self) -> dict[str, list[Call]]:
        """All calls; an event that only idle waits name is idle too."""
        events = [
            dataclasses.replace(call, is_idle=call.number not in self._needed_events) for call in self.calls["event"]
        ]
        return {**self.calls, "event": events}


def calls_of(program: Program) -> dict[str, list[Call]]:
    """The engine's calls in one run without a fault; those that the program makes itself are left out."""
    notes = _Notes()

    def steps(simulation: Simulation | None) -> list[torch.Tensor]:
        values = program.steps(simulation)
        notes.is_over = True  # what comes now runs everything that is queued
        return values

    outcome = run(dataclasses.replace(program, steps=steps), notes.arm)
    assert outcome.error is None, f"{program.name}: {outcome.error}"
    return notes.close()


def _place(frame: FrameType | None) -> str | None:
    """The two innermost functions of the engine on the stack: ``write < start_offload``."""
    names: list[str] = []
    while frame is not None and len(names) < 2:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        if module.startswith("hyper_parallel.core") and not (module.endswith("adapter") or name in ("_write", "held")):
            names.append(name)
        frame = frame.f_back
    return " < ".join(names) or None


def _are_equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(left, right) for left, right in zip(one, two))
