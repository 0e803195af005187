"""Measures how long copies take and how long compute waits for them; measuring itself never waits.

Every measurement is a pair of device events that is read later, once both are known to be done. The host runs far ahead
of the device, so whether a load was late is not known when the host unpacks it: that depends on two moments on the device,
and is read a little later from the events.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

from hyper_parallel.core.activation_checkpoint.adapter import Completion, DeviceBackend, Event, StreamCompletion
from hyper_parallel.core.activation_checkpoint.statistics import Counters

__all__ = ["LinkClock", "LinkSpan"]

_FIRST_HORIZON_US: Final = 8_000.0
_LONGEST_HORIZON_US: Final = 40_000.0
_HORIZON_GROWTH: Final = 1.25
_LATE_US: Final = 50.0  # below this a wait is the cost of the events themselves
_READ_EVERY: Final = 128
_FIRST_PREFETCH_BYTES: Final = 256 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkSpan:
    """A copy or a stall, in device time from the start of the recorded timeline."""

    track: str  # "copy out", "copy back", "stall"
    start_us: float
    end_us: float
    nbytes: int


class _OpenTimeline:
    """The events of a timeline that is being recorded; read when it ends, once everything is done."""

    def __init__(self, base: Event) -> None:
        self.base = base
        self.copies: list[tuple[Event | None, Event, int, bool]] = []
        self.stalls: list[tuple[Event, Event]] = []


class LinkClock:
    """The measured link of one device, both directions, and the stalls it caused."""

    def __init__(self, backend: DeviceBackend, counters: Counters) -> None:
        self._backend = backend
        self._counters = counters
        self._copies: deque[tuple[Event, Event, int, bool]] = deque()
        self._stalls: deque[tuple[Event, Event, bool]] = deque()
        self._horizon_us = _FIRST_HORIZON_US
        self._open_timeline: _OpenTimeline | None = None
        self.out_bytes_per_us: float | None = None
        self.back_bytes_per_us: float | None = None

    @property
    def prefetch_bytes(self) -> int:
        """How many bytes the link loads within the horizon; a fixed guess until it was measured."""
        if self.back_bytes_per_us is None:
            return _FIRST_PREFETCH_BYTES
        return int(self.back_bytes_per_us * self._horizon_us)

    def copied(self, completion: Completion | None, nbytes: int, *, is_out: bool) -> None:
        """A copy of ``nbytes`` was queued."""
        if not isinstance(completion, StreamCompletion):
            return
        if self._open_timeline is not None:
            self._open_timeline.copies.append((completion.start, completion.end, nbytes, is_out))
        if completion.start is None:
            self._counters.add("copy_us", self._expected_us(nbytes, is_out=is_out))
            return
        self._copies.append((completion.start, completion.end, nbytes, is_out))
        if len(self._copies) % _READ_EVERY == 0:
            self.read_finished()  # a forward that no backward follows must not let the list grow

    def _expected_us(self, nbytes: int, *, is_out: bool) -> float:
        """How long a copy without a start event takes, by the measured rate; 0 before the first measurement."""
        rate = self.out_bytes_per_us if is_out else self.back_bytes_per_us
        return 0.0 if rate is None else nbytes / rate

    def stalled(self, completion: Completion, *, is_load: bool = False) -> None:
        """Compute is about to be ordered after a copy: from this moment on it may have to wait for it."""
        if not isinstance(completion, StreamCompletion):
            return
        stream = self._backend.current_stream()
        if not completion.is_ordered_before(stream) and not completion.is_done():
            arrival = self._backend.record_event(stream, timing=True)
            self._stalls.append((arrival, completion.end, is_load))
            if self._open_timeline is not None:
                self._open_timeline.stalls.append((arrival, completion.end))

    def start_recording(self) -> None:
        """Keep every copy and stall from now on."""
        self._open_timeline = _OpenTimeline(self._backend.record_event(self._backend.current_stream(), timing=True))

    def stop_recording(self) -> list[LinkSpan]:
        """What happened since, in device time. Waits for it to be over."""
        timeline, self._open_timeline = self._open_timeline, None
        if timeline is None:
            return []
        spans: list[LinkSpan] = []
        for start, end, nbytes, is_out in timeline.copies:
            self._backend.synchronize_event(end)
            track = "copy out" if is_out else "copy back"
            end_us = self._backend.elapsed_us(timeline.base, end)
            if start is None:
                start_us = end_us - self._expected_us(nbytes, is_out=is_out)
            else:
                start_us = self._backend.elapsed_us(timeline.base, start)
            spans.append(LinkSpan(track=track, start_us=start_us, end_us=end_us, nbytes=nbytes))
        for arrival, end in timeline.stalls:
            self._backend.synchronize_event(arrival)
            self._backend.synchronize_event(end)
            if self._backend.elapsed_us(arrival, end) > 0:
                start_us = self._backend.elapsed_us(timeline.base, arrival)
                end_us = self._backend.elapsed_us(timeline.base, end)
                spans.append(LinkSpan(track="stall", start_us=start_us, end_us=end_us, nbytes=0))
        return sorted(spans, key=lambda span: span.start_us)

    def read_finished(self) -> None:
        """Read every measurement that is done by now."""
        is_late = False
        while self._stalls and self._both_done(self._stalls[0][0], self._stalls[0][1]):
            arrival, end, is_load = self._stalls.popleft()
            waited_us = self._backend.elapsed_us(arrival, end)
            if waited_us > _LATE_US:
                self._counters.add("exposed_copy_us", waited_us)
                if is_load:
                    self._counters.add("late_loads", 1)
                    is_late = True
        while self._copies and self._backend.event_is_done(
            self._copies[0][1]
        ):  # its start came before, on the same stream
            self._measure(*self._copies.popleft())
        if is_late:
            self._horizon_us = min(self._horizon_us * _HORIZON_GROWTH, _LONGEST_HORIZON_US)

    def _both_done(self, first: Event, second: Event) -> bool:
        return self._backend.event_is_done(first) and self._backend.event_is_done(second)

    def _measure(self, start: Event, end: Event, nbytes: int, is_out: bool) -> None:
        duration_us = self._backend.elapsed_us(start, end)
        if duration_us <= 0:
            return
        self._counters.add("copy_us", duration_us)
        name = "out_bytes_per_us" if is_out else "back_bytes_per_us"
        known: float | None = getattr(self, name)
        rate = nbytes / duration_us
        setattr(self, name, rate if known is None else 0.9 * known + 0.1 * rate)
