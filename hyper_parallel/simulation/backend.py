"""The simulated device, for either framework: CPU tensors as device memory.

The backend counts the bytes of every storage that it is told of, and checks that each access to device bytes is
ordered after the copies. Buffers are poisoned when they are allocated. A copy that waits to run holds its device side
weakly, as a real copy does: bytes that are dropped too early are found.

What differs between the frameworks is a few functions on flat bytes (:class:`SimulatedMemory`) and a dispatch mode that
sees every op of a thread and tells the backend what the op touches.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.devices import OneByOne, simulated_key
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream, SimulationError

__all__ = ["POISON", "ByteRange", "SimulatedBackend", "SimulatedMemory", "simulate_device"]

POISON = 0xFF
"""Every byte of a new buffer: NaN in every floating type."""


class ByteRange(NamedTuple):
    """Some bytes of a storage."""

    key: int  # names the storage among the living ones
    start: int
    end: int


class _Life(NamedTuple):
    """Device bytes that are counted, and the object that dies with them."""

    owner: weakref.ref[Any]
    nbytes: int


class SimulatedMemory(Protocol):
    """What the simulated device needs from a framework."""

    framework: str
    """``torch`` or ``mindspore``."""
    host_kind: str
    """What the framework calls the device whose tensors are simulated device memory: ``cpu``, ``CPU``."""
    object_outlives_bytes: bool
    """Whether an owner may live on without its bytes, so that :meth:`is_freed` must be asked."""

    def watch(self, backend: SimulatedBackend) -> AbstractContextManager[Any]:
        """A context in which the backend is told what every op of this thread touches."""

    def unseen(self) -> AbstractContextManager[None]:
        """See :class:`DeviceBackend`."""

    def new_device_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """Poisoned bytes, and the object that dies when the last tensor over them does."""

    def new_host_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """The same for host bytes."""

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See :class:`DeviceBackend`."""

    def range_of(self, flat: FlatBytes) -> ByteRange:
        """Where the bytes are."""

    def hold_weakly(self, flat: FlatBytes, owner: weakref.ref[Any] | None) -> Callable[[], FlatBytes | None]:
        """A function that gives the bytes again, or None when they are gone. ``owner`` is None where the backend has none."""

    def is_freed(self, owner: Any) -> bool:
        """Whether the owner's bytes are gone."""

    def copy_now(self, destination: FlatBytes, source: FlatBytes) -> None:
        """Copy all bytes; called where ops are unseen."""

    def around_queueing(self, *, goes_out: bool) -> AbstractContextManager[Any]:
        """A context around the queueing of a copy."""


class SimulatedBackend(OneByOne):
    """A :class:`DeviceBackend`; every method lets simulated time pass."""

    is_host_memory = False

    def __init__(self, memory: SimulatedMemory, simulation: Simulation) -> None:
        self.name = f"{memory.framework} simulated"  # far memory keeps the host buffers of two frameworks apart by it
        self.simulation = simulation
        self.unseen = memory.unseen
        self.host_view = memory.host_view
        self._memory = memory
        self._timeline = simulation.timeline
        self._accesses = simulation.accesses
        self._lives: dict[int, _Life] = {}  # of device storages, by key
        self._host_owners: dict[int, weakref.ref[Any]] = {}  # of host storages, by key
        if memory.object_outlives_bytes:
            simulation.count_freed_bytes = self._end_freed_lives

    # ------------------------------------------------------------------ streams and events

    def current_stream(self) -> SimulatedStream:
        """The one compute stream."""
        return self._timeline.compute

    def new_stream(self) -> SimulatedStream:
        """A copy stream."""
        return self._timeline.new_lane()

    def record_event(self, stream: Stream, *, timing: bool = False) -> SimulatedEvent:
        """An event after everything queued on ``stream`` so far."""
        with self._timeline.lock:
            self.simulation.count_freed_bytes()
            stream = self._timeline.lane_of(stream)
            self._timeline.drift()
            return self._timeline.record(stream)

    def wait_event(self, stream: Stream, event: SimulatedEvent) -> None:
        """Order what is queued on ``stream`` from now on after ``event``."""
        self.simulation.count_freed_bytes()
        self._timeline.drift()
        self._timeline.wait(self._timeline.lane_of(stream), event)

    def event_is_done(self, event: SimulatedEvent) -> bool:
        """Whether the simulated host can see it; seeing it orders what is queued later."""
        self._timeline.drift()
        return self._timeline.is_done(event)

    def synchronize_event(self, event: SimulatedEvent) -> None:
        """Run everything queued before the event."""
        self.simulation.count_freed_bytes()
        self._timeline.synchronize(event)

    def elapsed_us(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        """0 where simulated time has no length."""
        return (end.seconds - start.seconds) * 1e6

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> FlatBytes:
        """Poisoned device bytes."""
        flat, owner = self._memory.new_device_bytes(nbytes)
        # An allocator may hand out a block whose last kernels still run: taking it is a touch.
        self.touch(self._memory.range_of(flat).key, nbytes, owner=owner, is_write=True, what="allocation")
        return flat

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """Poisoned host bytes. Copies of an earlier buffer at the same place have run: each of them held it."""
        flat, owner = self._memory.new_host_bytes(nbytes)
        key = self._memory.range_of(flat).key
        with self._timeline.lock:
            self._accesses.forget(key)
            self._host_owners[key] = weakref.ref(owner, lambda dead: self._forget_host(key, dead))
        return flat

    def _forget_host(self, key: int, owner: weakref.ref[Any]) -> None:
        """What comes to lie at the same place may be bytes whose making no mode sees: they have no copies to wait for."""
        with self._timeline.lock:
            if self._host_owners.get(key) is owner:
                del self._host_owners[key]
                self._accesses.forget(key)

    def dropped(self, nbytes: int) -> None:
        """Nothing to do: the owner's death is seen."""

    def held_bytes(self) -> int | None:
        """The simulated device's live bytes."""
        return self.simulation.live_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether a test says that the device is full."""
        return isinstance(error, MemoryError)

    # ------------------------------------------------------------------ copies

    def copy_all(self, copies: Sequence[tuple[FlatBytes, FlatBytes]], stream: Stream) -> None:
        """Queue each of them."""
        for destination, source in copies:
            self.copy(destination, source, stream)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Queue a copy, after both of its sides are checked."""
        with self._timeline.lock:
            lane = self._timeline.lane_of(stream)
            self.simulation.count_freed_bytes()
            self._timeline.drift()
            self._timeline.tick(lane)
            read, written = self._memory.range_of(source), self._memory.range_of(destination)
            goes_out = self.is_host(destination)
            if goes_out:
                self.simulation.swapped_bytes += read.end - read.start
            what = "copy out" if goes_out else "copy back"
            self._claim(lane, read, is_write=False, what=what)
            self._claim(lane, written, is_write=True, what=what)
            if self._timeline.speed is not None:
                lane.seconds += self._timeline.speed.of_copy(read.end - read.start)
            with self._memory.around_queueing(goes_out=goes_out):
                life = self._lives.get((read if goes_out else written).key)
                self._timeline.enqueue(lane, _Copy(self._memory, destination, source, life, goes_out=goes_out))

    def is_host(self, flat: FlatBytes) -> bool:
        """Whether the bytes are no counted device bytes: a copy to them goes out."""
        return self._memory.range_of(flat).key not in self._lives

    def _claim(self, stream: SimulatedStream, part: ByteRange, *, is_write: bool, what: str) -> None:
        self.check(stream, part, is_write=is_write, what=what)
        self._accesses.touch(stream, part.key, part.start, part.end, is_write=is_write, what=what)

    def check(self, stream: SimulatedStream, part: ByteRange, *, is_write: bool, what: str) -> None:
        """Raise when a touch is not ordered after an earlier one."""
        known = self._accesses.conflict(stream, part.key, part.start, part.end, is_write=is_write)
        if known is not None:
            raise SimulationError(
                f"simulated accelerator: {what} on {stream.name} {'writes' if is_write else 'reads'} bytes that {known.what} on "
                f"{known.stream} {'writes' if known.is_write else 'reads'}, and nothing orders the one after the other"
            )

    # ------------------------------------------------------------------ what ops touch

    def before_op(self) -> None:
        """Let time pass before an op, and raise what went wrong where nothing could be raised."""
        self.simulation.count_freed_bytes()
        self._timeline.drift()
        self.simulation.raise_violations()

    @property
    def has_clock(self) -> bool:
        """Whether ops take time here."""
        return self._timeline.speed is not None

    def run_op(self, flops: int, nbytes: int) -> None:
        """An op ran that touched so many bytes."""
        speed = self._timeline.speed
        if speed is not None:
            self._timeline.compute.seconds += speed.of_op(flops, nbytes)

    def check_read(self, key: int, nbytes: int, *, what: str) -> None:
        """Raise when the compute stream must not read a storage yet.

        A change in place by the user races with a copy out on any device, and the engine finds it by versions. So what an
        op writes is not checked here, only that it may read.
        """
        self.check(self._timeline.compute, ByteRange(key, 0, max(1, nbytes)), is_write=False, what=what)

    def touch(self, key: int, nbytes: int, *, owner: object | None, is_write: bool, what: str) -> None:
        """The compute stream touches a device storage. It is counted from its first touch on until ``owner`` dies.

        ``owner`` is None where the framework has no such object: these bytes are checked, and not counted.
        """
        with self._timeline.lock:
            self.simulation.count_freed_bytes()
            if owner is not None and key not in self._lives:
                self._lives[key] = _Life(weakref.ref(owner, lambda dead: self._end_life(key, dead)), nbytes)
                self.simulation.count(nbytes)
                self._accesses.forget(key)
                self.simulation.raise_if_full(what)
            compute = self._timeline.compute
            self._timeline.tick(compute)
            self._accesses.touch(compute, key, 0, max(1, nbytes), is_write=is_write, what=what)

    def _end_freed_lives(self) -> None:
        """End the lives of bytes that are gone although their owner lives."""
        with self._timeline.lock:
            for key, life in list(self._lives.items()):
                owner = life.owner()
                if owner is not None and self._memory.is_freed(owner):
                    self._end_life(key, life.owner)

    def _end_life(self, key: int, owner: weakref.ref[Any]) -> None:
        with self._timeline.lock:
            life = self._lives.get(key)
            if life is None or life.owner is not owner:
                return  # it was ended already
            del self._lives[key]
            self.simulation.count(-life.nbytes)
            compute = self._timeline.compute
            self._timeline.pass_on(compute)  # the bytes are given to something that is queued from now on
            known = self._accesses.conflict(compute, key, 0, max(1, life.nbytes), is_write=True)
            if known is not None:
                self._accesses.add_violation(
                    f"simulated accelerator: device bytes were let go while {known.what} on {known.stream} may still "
                    "be using them"
                )
            self._accesses.forget(key)


class _Copy:
    """One queued copy. Its device side is held weakly: only the engine's own reference keeps it."""

    __slots__ = ("_device", "_goes_out", "_host", "_memory")

    def __init__(
        self,
        memory: SimulatedMemory,
        destination: FlatBytes,
        source: FlatBytes,
        life: _Life | None,
        *,
        goes_out: bool,
    ) -> None:
        device, self._host = (source, destination) if goes_out else (destination, source)
        self._memory = memory
        self._goes_out = goes_out
        self._device = memory.hold_weakly(device, None if life is None else life.owner)

    def __call__(self) -> None:
        with self._memory.unseen():
            device = self._device()
            if device is None:
                return  # the violation was recorded when its life ended
            if self._goes_out:
                self._memory.copy_now(self._host, device)
            else:
                self._memory.copy_now(device, self._host)


@contextlib.contextmanager
def simulate_device(memory: SimulatedMemory, timing: str, seed: int) -> Iterator[Simulation]:
    """CPU tensors of one framework are device memory inside (see ``hyper_parallel.testing.simulated_accelerator``)."""
    simulation = Simulation(timing, seed)
    backend = SimulatedBackend(memory, simulation)
    manager = SwapManager()
    key = simulated_key(memory.framework, memory.host_kind)
    outer = manager.backends.get(key)
    manager.backends[key] = backend
    outer_trace, manager.counters.trace = manager.counters.trace, simulation.trace
    try:
        with memory.watch(backend):
            yield simulation
        simulation.timeline.drain()
        simulation.raise_violations()
    finally:
        manager.counters.trace = outer_trace
        manager.forget_backend(backend)
        if outer is not None:
            manager.backends[key] = outer
