"""What the devices of both frameworks do in the same way: streams and events, host memory as a device, and the look-up.

A framework's ``devices.py`` adds to each class below what only the framework can do: take memory, copy, and say what is held.
See :class:`~hyper_parallel.core.activation_checkpoint.adapter.DeviceBackend` for what each method promises.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Event, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["HostDevice", "OneByOne", "StreamDevice", "find_backend", "host_refused", "simulated_key"]


def _oldest(events: deque[Event]) -> tuple[Event, int]:
    """The oldest event, which becomes the newest, and how many references to it there were while it was out of the list."""
    event = events.popleft()
    references = sys.getrefcount(event)
    events.append(event)
    return event, references


_UNUSED: Final = _oldest(deque([object()]))[1]  # releases of Python differ in which of their own references they count
_MOST_KNOWN_EVENTS: Final = 4096
_MOST_LOOKS: Final = 3


class OneByOne:
    """A device that is asked for one buffer and one copy at a time: where several in one call save nothing."""

    def allocate_all(self: DeviceBackend, sizes: Sequence[int]) -> list[FlatBytes]:
        """As many of the buffers as the device has memory for, at least one."""
        made: list[FlatBytes] = []
        for nbytes in sizes:
            try:
                made.append(self.allocate(nbytes))
            except Exception as error:
                if not made or not self.is_out_of_memory(error):
                    raise
                break
        return made

    def copy_all(self: DeviceBackend, copies: Sequence[tuple[FlatBytes, FlatBytes]], stream: Stream) -> None:
        """Queue each copy."""
        for destination, source in copies:
            self.copy(destination, source, stream)


class StreamDevice(OneByOne):
    """An accelerator with real streams and events. Those of torch and of MindSpore have the same methods."""

    is_host_memory = False

    def __init__(self, name: str, new_event: Callable[..., Event], *, reuses_events: bool = False) -> None:
        self.name = name
        self._new_event = new_event  # the framework's class of events
        self._known_events: dict[bool, deque[Event]] = {False: deque(), True: deque()} if reuses_events else {}

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """An event of the framework's, recorded on ``stream``."""
        event = self._unused_event(timing) if self._known_events else self._new_event(enable_timing=timing)
        event.record(stream)
        return event

    def _unused_event(self, timing: bool) -> Event:
        """An event without another holder, to be recorded again; else a new one.

        An event that is recorded again names its new position only. A stream that waits already is not affected: it took the
        old position when it was told to wait. Code that still asks whether the event happened would get the wrong answer. So an
        event is reused when the only reference to it is the list's. One thread has an event at a time, because it is out of the
        list while it is looked at.
        """
        known = self._known_events[timing]
        for _ in range(min(_MOST_LOOKS, len(known))):
            event, references = _oldest(known)
            if references == _UNUSED:
                return event
        event = self._new_event(enable_timing=timing)
        if len(known) < _MOST_KNOWN_EVENTS:
            known.append(event)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Order what is queued on ``stream`` from now on after ``event``; the host does not wait."""
        stream.wait_event(event)

    def event_is_done(self, event: Event) -> bool:
        """Whether the event happened; never waits."""
        return bool(event.query())

    def synchronize_event(self, event: Event) -> None:
        """Wait on the host for the event."""
        event.synchronize()

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Device time between two timing events."""
        return float(start.elapsed_time(end)) * 1e3

    def dropped(self, nbytes: int) -> None:
        """Nothing to do: the framework's pool of device memory reuses what it gets back."""


class HostDevice(OneByOne):
    """Host memory as the device: ops run in program order, so nothing needs an event and only files are asynchronous."""

    is_host_memory = True
    name = "cpu"

    def current_stream(self) -> Stream:
        """There is none."""
        return None

    def new_stream(self) -> Stream:
        """There is none."""
        return None

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """The time now, in nanoseconds."""
        return time.perf_counter_ns()

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Nothing to do: the event happened when it was recorded."""

    def event_is_done(self, event: Event) -> bool:
        """True: the event happened when it was recorded."""
        return True

    def synchronize_event(self, event: Event) -> None:
        """Nothing to do: the event happened when it was recorded."""

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Host time between two events."""
        return float(end - start) / 1e3

    def held_bytes(self) -> int | None:
        """None: the process's resident bytes are not those of its tensors, and asking for them is slow."""
        return None


def host_refused(name: str, nbytes: int, *, pinned: bool) -> MemoryError:
    """What ``allocate_host`` raises when the host has no such memory."""
    return MemoryError(f"{name}: the host refused {nbytes} bytes of {'pinned ' * pinned}memory")


def simulated_key(framework: str, kind: str) -> tuple[str, str]:
    """Under this key of ``SwapManager.backends`` a simulation takes the place of a framework's devices of one kind."""
    return f"{framework} simulated", kind


def find_backend(
    framework: str,
    kind: str,
    config: SwapConfig,
    *,
    host_kind: str,
    name: Callable[[], str],
    make: Callable[[str], DeviceBackend],
) -> DeviceBackend | None:
    """The backend of a device, made at its first use and kept by the manager.

    Args:
        framework: ``torch`` or ``mindspore``.
        kind: what the framework calls the kind of device: ``cuda``, ``Ascend``, ``cpu``.
        config: the settings; they say whether values in host memory go to a file.
        host_kind: the kind whose tensors are in host memory.
        name: gives the name of the one device, with its index.
        make: makes the backend of the device with that name.

    Returns:
        None where the device's tensors are in host memory already and the settings name no file for them.
    """
    backends = SwapManager().backends
    simulated = backends.get(simulated_key(framework, kind))
    if simulated is not None:
        return simulated
    if kind == "meta" or (kind == host_kind and "disk" not in config.tiers):
        return None
    device_name = name()
    key = (framework, device_name)
    backend = backends.get(key)
    if backend is None:
        backend = backends.setdefault(key, make(device_name))
    return backend
