"""Simulated copy streams: work that runs when something waits for it, and a check that accesses to the same bytes are ordered.

Theory of operation
-------------------
*Lazy work.* What is queued on a copy stream runs only when something waits for it (or at random moments, by a seed), so
a missing wait reads bytes that never arrived, every time and not by chance. The compute stream runs at once.

*Clocks.* Every stream has a vector clock: how far it has seen each other stream. Recording an event takes a snapshot,
waiting for it joins the snapshot, and the host passes on whatever it saw done. Two accesses to the same bytes of which
one writes must be ordered by these clocks. That finds a missing order even where the values happen to be right.

*Faults.* A test can make the device ignore single waits and events, by their numbers. It shows that the engine needs each
of them: without it the check of accesses or a comparison of values must fail.

*Time.* Where the device has a speed (``speed.py``), every stream also knows when its work is over, in seconds of the device.

This file knows no framework: bytes are (key, start, end).
"""

from __future__ import annotations

import functools
import random
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.simulation.speed import DeviceSpeed

__all__ = ["Access", "AccessLog", "SimulatedEvent", "SimulatedStream", "SimulationError", "Timeline"]

Clock = dict[str, int]

_HOST_LAG = 64  # copies


class SimulationError(HyperParallelError):
    """Something used bytes of the simulated device at a moment when a real device may not have them."""


class SimulatedStream:
    """One stream: a name, a clock, and what waits to run."""

    def __init__(self, name: str, *, runs_at_once: bool) -> None:
        self.name = name
        self.runs_at_once = runs_at_once
        self.clock: Clock = {name: 0}
        self.pending: deque[Callable[[], None]] = deque()
        self.queued = 0
        self.done = 0
        self.seen_by_host = 0  # how far the host has waited for it
        self.seconds = 0.0  # when everything queued on it is over, where the device has a speed

    def __repr__(self) -> str:
        return f"<simulated stream {self.name}>"


class SimulatedEvent:
    """A point on a stream: done when everything queued before it ran."""

    __slots__ = ("clock", "seconds", "stream", "target")

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.target = stream.queued
        self.clock = dict(stream.clock)
        self.seconds = stream.seconds


class Access:
    """One touch of some bytes by a stream."""

    __slots__ = ("end", "is_write", "start", "stream", "time", "what")

    def __init__(self, stream: SimulatedStream, start: int, end: int, *, is_write: bool, what: str) -> None:
        self.stream = stream.name
        self.time = stream.clock[stream.name]
        self.start = start
        self.end = end
        self.is_write = is_write
        self.what = what


class AccessLog:
    """Which stream touched which bytes last; finds two touches that have no order."""

    def __init__(self) -> None:
        self._accesses: dict[int, list[Access]] = {}
        self.violations: list[str] = []

    def conflict(self, stream: SimulatedStream, key: int, start: int, end: int, *, is_write: bool) -> Access | None:
        """An earlier touch of the same bytes that this one is not ordered after."""
        for known in self._accesses.get(key, ()):
            overlaps = known.start < end and start < known.end
            is_ordered = known.stream == stream.name or stream.clock.get(known.stream, -1) >= known.time
            if overlaps and (is_write or known.is_write) and not is_ordered:
                return known
        return None

    def touch(self, stream: SimulatedStream, key: int, start: int, end: int, *, is_write: bool, what: str) -> None:
        """Record a touch; what it covers and is ordered after can be forgotten."""
        access = Access(stream, start, end, is_write=is_write, what=what)
        kept = [
            known
            for known in self._accesses.get(key, ())
            if not (
                start <= known.start
                and known.end <= end
                and (is_write or not known.is_write)
                and (known.stream == stream.name or stream.clock.get(known.stream, -1) >= known.time)
            )
        ]
        self._accesses[key] = [*kept, access]

    def forget(self, key: int) -> None:
        """The bytes are gone."""
        self._accesses.pop(key, None)

    def add_violation(self, message: str) -> None:
        """Remember a violation that cannot be raised where it happened."""
        self.violations.append(message)


Method = TypeVar("Method", bound=Callable[..., Any])


def _locked(method: Method) -> Method:
    """Hold the timeline's lock."""

    @functools.wraps(method)
    def held(self: Timeline, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method, held)


class Timeline:
    """All streams of one simulated device."""

    def __init__(self, timing: str, seed: int) -> None:
        known = ("lazy", "random", "eager")
        if timing not in known:
            raise ValueError(f"simulated_accelerator: unknown timing {timing!r}; known are {', '.join(known)}")
        self.timing = timing
        self.speed: DeviceSpeed | None = None  # None: simulated time has no length
        self._random = random.Random(seed)
        self.lock = threading.RLock()  # workers of a tier queue copies too
        self.compute = SimulatedStream("compute", runs_at_once=True)
        self.lanes: list[SimulatedStream] = []
        self._lane_of: dict[int, tuple[Any, SimulatedStream]] = {}  # id of a foreign stream -> that stream, its lane
        self._host_clock: Clock = {}
        self.num_waits = 0
        self.num_events = 0
        self.skip_waits: Collection[int] = ()
        """For tests: the waits with these numbers, counted from 0, order nothing."""
        self.skip_events: Collection[int] = ()
        """For tests: the events with these numbers are never recorded. As on a device, a wait for one orders nothing."""

    @_locked
    def new_lane(self) -> SimulatedStream:
        """A copy stream."""
        lane = SimulatedStream(f"copy-{len(self.lanes)}", runs_at_once=False)
        self.lanes.append(lane)
        return lane

    @_locked
    def lane_of(self, stream: Any) -> SimulatedStream:
        """The simulated stream that stands for ``stream``.

        A simulated stream stands for itself. The platform's own ``new_stream()`` gives a stream of the host where the
        simulation plays the device: such a stream gets a copy stream of its own at its first use.
        """
        if isinstance(stream, SimulatedStream):
            return stream
        if id(stream) not in self._lane_of:  # the entry keeps the foreign stream alive, so that its id stays its own
            self._lane_of[id(stream)] = stream, self.new_lane()
        return self._lane_of[id(stream)][1]

    @_locked
    def tick(self, stream: SimulatedStream) -> None:
        """Something is queued on ``stream``: it is after everything the host has seen."""
        self.pass_on(stream)
        stream.clock[stream.name] += 1

    @_locked
    def pass_on(self, stream: SimulatedStream) -> None:
        """Whatever is queued on ``stream`` next is after everything the host has seen."""
        _join(stream.clock, self._host_clock)

    @_locked
    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        """An event behind everything that is queued on ``stream``."""
        self.tick(stream)
        event = SimulatedEvent(stream)
        if self.num_events in self.skip_events:
            event.target, event.clock = 0, {}
        self.num_events += 1
        return event

    @_locked
    def enqueue(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        """Queue work."""
        if stream.runs_at_once:
            work()
            return
        stream.pending.append(work)
        stream.queued += 1
        if self.timing == "eager":
            self._run_until(stream, stream.queued)

    @_locked
    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Order what is queued on ``stream`` from now on after ``event``."""
        if self._is_skipped():
            return
        _join(stream.clock, event.clock)
        stream.seconds = max(stream.seconds, event.seconds)
        if stream is not event.stream:
            self.enqueue(stream, lambda: self._run_until(event.stream, event.target))

    def _is_skipped(self) -> bool:
        """Count a wait, and say whether a test wants it ignored."""
        self.num_waits += 1
        return self.num_waits - 1 in self.skip_waits

    @_locked
    def is_done(self, event: SimulatedEvent) -> bool:
        """What the host sees; seeing it orders everything queued later.

        Under lazy timing the host looks late, as it does when it runs ahead of a device: it sees what it waited for, and
        what lies far back.
        """
        stream = event.stream
        if stream.done < event.target:
            return False
        is_seen = event.target <= stream.seen_by_host or stream.done - event.target >= _HOST_LAG
        if self.timing == "lazy" and not stream.runs_at_once and not is_seen:
            return False
        _join(self._host_clock, event.clock)
        return True

    @_locked
    def synchronize(self, event: SimulatedEvent) -> None:
        """The host waits."""
        if self._is_skipped():
            return
        self._run_until(event.stream, event.target)
        event.stream.seen_by_host = max(event.stream.seen_by_host, event.target)
        _join(self._host_clock, event.clock)

    @_locked
    def drift(self) -> None:
        """Let time pass: under random timing some queued work runs now."""
        if self.timing == "random":
            for lane in self.lanes:
                while lane.pending and self._random.random() < 0.3:
                    self._run_until(lane, lane.done + 1)

    @_locked
    def drain(self) -> None:
        """Run everything that is queued."""
        for lane in self.lanes:
            self._run_until(lane, lane.queued)

    def _run_until(self, stream: SimulatedStream, target: int) -> None:
        while stream.done < target and stream.pending:
            work = stream.pending.popleft()
            work()
            stream.done += 1


def _join(into: Clock, other: Any) -> None:
    for name, time in other.items():
        if into.get(name, -1) < time:
            into[name] = time
