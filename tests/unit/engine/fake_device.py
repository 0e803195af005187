"""A device for unit tests, made of bytearrays and lists; it imports no framework.

* Bytes are ``memoryview`` objects over a ``bytearray`` of their own. Device bytes are counted until their last view dies.
* A stream is a list of queued steps. Nothing runs until a test says ``run`` or the engine synchronizes an event.
* An event has happened when its stream ran past it. A stream that waits for an event stands still until then.
* ``log`` holds every call that the engine made, in order, so that a test can compare the whole list.
* Time is a number. It grows by ``copy_us`` with every copy that runs, and by what a test adds.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable

from hyper_parallel.core.activation_checkpoint.devices import OneByOne


class FakeEvent:
    """A point on a stream."""

    def __init__(self, name: str, stream: FakeStream) -> None:
        self.name = name
        self.stream = stream
        self.at_us: float | None = None  # None until it happened


class FakeStream:
    """Queued steps. A step answers False when it cannot run yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: deque[Callable[[], bool]] = deque()

    def run(self) -> bool:
        """Run until a step must wait for another stream. True when anything ran."""
        has_run = False
        while self.steps and self.steps[0]():
            self.steps.popleft()
            has_run = True
        return has_run


class _DeviceBytes(bytearray):
    """A bytearray that weak references may name."""


class FakeDevice(OneByOne):
    """See ``DeviceBackend``. ``capacity_bytes`` and ``host_bytes`` are what the device and the host can give in all."""

    name = "fake"
    is_host_memory = False

    def __init__(self, *, capacity_bytes: int | None = None, host_bytes: int | None = None) -> None:
        self.log: list[str] = []
        self.capacity_bytes = capacity_bytes
        self.host_bytes = host_bytes
        self.now_us = 0.0
        self.copy_us = 0.0
        self.copy_fails: Exception | None = None  # raised by the next call of ``copy``
        self._held_bytes = 0
        self._events = 0
        self.streams = [FakeStream("compute")]
        self.current = self.streams[0]

    # ---------------------------------------------------------------- what tests say

    def take_log(self) -> list[str]:
        """What was called since the last look."""
        log, self.log = self.log, []
        return log

    def fill(self, text: bytes) -> memoryview:
        """Device bytes with this content, as an op's output has."""
        return memoryview(self._new(len(text), text))

    def run(self, *names: str) -> None:
        """Run the named streams, or all of them, as far as their waits allow."""
        chosen = [stream for stream in self.streams if not names or stream.name in names]
        while sum(stream.run() for stream in chosen):  # each of them, in turn, until none can go on
            pass

    def queue(self, step: Callable[[], object]) -> None:
        """Queue a kernel on the current stream."""
        self.current.steps.append(lambda: (step(), True)[1])

    # ---------------------------------------------------------------- what the engine calls

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> FakeStream:
        return self.current

    def new_stream(self) -> FakeStream:
        names = ("out", "back")  # the order in which ``Lanes`` asks for them
        at = len(self.streams) - 1
        self.streams.append(FakeStream(names[at] if at < len(names) else f"stream{at}"))
        return self.streams[-1]

    def record_event(self, stream: FakeStream, *, timing: bool = False) -> FakeEvent:
        self._events += 1
        event = FakeEvent(f"e{self._events}", stream)
        stream.steps.append(lambda: self._happen(event))
        self.log.append(f"{stream.name}: record {event.name}")
        return event

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.steps.append(lambda: event.at_us is not None)
        self.log.append(f"{stream.name}: wait {event.name}")

    def event_is_done(self, event: FakeEvent) -> bool:
        return event.at_us is not None

    def synchronize_event(self, event: FakeEvent) -> None:
        self.log.append(f"host: synchronize {event.name}")
        self.run()
        assert event.at_us is not None, f"{event.name} on {event.stream.name} can never happen"

    def elapsed_us(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.at_us is not None
        assert end.at_us is not None
        return end.at_us - start.at_us

    def allocate(self, nbytes: int) -> memoryview:
        if self.capacity_bytes is not None and self._held_bytes + nbytes > self.capacity_bytes:
            self.log.append(f"{self.current.name}: allocate {nbytes} fails")
            raise MemoryError(f"the fake device has {self.capacity_bytes} bytes")
        self.log.append(f"{self.current.name}: allocate {nbytes}")
        return memoryview(self._new(nbytes, b"?" * nbytes))

    def dropped(self, nbytes: int) -> None:
        self.log.append(f"host: drop {nbytes}")

    def held_bytes(self) -> int | None:
        return self._held_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> memoryview:
        if self.host_bytes is not None and nbytes > self.host_bytes:
            raise MemoryError(f"the fake host has {self.host_bytes} bytes")
        return memoryview(bytearray(b"?" * nbytes))

    def copy(self, destination: memoryview, source: memoryview, stream: FakeStream) -> None:
        if self.copy_fails is not None:
            error, self.copy_fails = self.copy_fails, None
            raise error
        stream.steps.append(lambda: self._copy(destination, source))
        self.log.append(f"{stream.name}: copy {len(source)}")

    def host_view(self, flat: memoryview) -> memoryview:
        return flat

    # ---------------------------------------------------------------- steps

    def _new(self, nbytes: int, content: bytes) -> _DeviceBytes:
        owner = _DeviceBytes(content)
        self._held_bytes += nbytes
        weakref.finalize(owner, self._gone, nbytes).atexit = False
        return owner

    def _gone(self, nbytes: int) -> None:
        self._held_bytes -= nbytes

    def _happen(self, event: FakeEvent) -> bool:
        event.at_us = self.now_us
        return True

    def _copy(self, destination: memoryview, source: memoryview) -> bool:
        self.now_us += self.copy_us
        destination[:] = source
        return True
