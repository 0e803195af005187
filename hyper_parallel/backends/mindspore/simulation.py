"""The simulated accelerator on MindSpore: CPU tensors as device memory (see ``hyper_parallel.testing``).

A dispatch mode sees every op of this thread and asks the judge whether each touch is ordered after the copies. Buffers
are poisoned when they are allocated. A copy that waits to run holds its device side weakly, as a real copy does.

Note: lives of storages
    MindSpore does not tell when a storage dies. So the mode moves the output of every op into memory of an array that it
    watches: a tensor made of an array keeps it alive, whoever holds the tensor, also the graph. Bytes that ops make and
    buffers that loads fill are thus counted exactly. The older primitives save before they return, so what such an op
    saves of its own output (a dropout's mask) stays in memory of MindSpore's own, as do tensors that no op made, such as
    weights and batches: these are judged, and not counted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.backends.mindspore.devices import SIMULATED, as_array
from hyper_parallel.backends.mindspore.ops import facts_of, replay_reason, tensors_in
from hyper_parallel.backends.mindspore.storages import (
    DeviceBytes,
    ViewSpec,
    flat_bytes,
    is_seen,
    numpy_dtype,
    storage_key,
    unseen,
)
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream, SimulationError

__all__ = ["SimulatedBackend", "simulate"]

_POISON = 0xFF  # NaN in every floating type


class SimulatedBackend:
    """See the protocol; every method lets simulated time pass."""

    name = "simulated"
    is_host_memory = False

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._timeline = simulation.timeline
        self._judge = simulation.judge
        self._arrays: dict[int, weakref.ref[Any]] = {}  # address -> numpy.ndarray

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """See the protocol."""
        return unseen()

    def current_stream(self) -> SimulatedStream:
        """See the protocol."""
        return self._timeline.compute

    def new_stream(self) -> SimulatedStream:
        """See the protocol."""
        return self._timeline.new_lane()

    def record_event(self, stream: Stream, *, timing: bool = False) -> SimulatedEvent:
        """See the protocol."""
        with self._timeline.lock:
            stream = self._timeline.lane_of(stream)
            self._timeline.drift()
            return self._timeline.record(stream)

    def wait_event(self, stream: Stream, event: SimulatedEvent) -> None:
        """See the protocol."""
        self._timeline.drift()
        self._timeline.wait(self._timeline.lane_of(stream), event)

    def event_is_done(self, event: SimulatedEvent) -> bool:
        """See the protocol."""
        self._timeline.drift()
        return self._timeline.is_done(event)

    def synchronize_event(self, event: SimulatedEvent) -> None:
        """See the protocol."""
        self._timeline.synchronize(event)

    def elapsed_us(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        """See the protocol; simulated time has no length."""
        return 0.0

    def allocate(self, nbytes: int) -> FlatBytes:
        """See the protocol."""
        flat = self.watched(np.full(nbytes, _POISON, dtype=np.uint8))
        # An allocator may hand out a block whose last kernels still run: taking it is a touch.
        self.touch(flat.storage_address, nbytes, is_write=True, what="allocation")
        return flat

    def dropped(self, nbytes: int) -> None:
        """See the protocol."""

    def held_bytes(self) -> int | None:
        """See the protocol."""
        return self._simulation.live_bytes

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol."""
        return isinstance(error, MemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """See the protocol."""
        return np.full(nbytes, _POISON, dtype=np.uint8)

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(as_array(flat))

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol."""
        with self._timeline.lock:
            stream = self._timeline.lane_of(stream)
            self._timeline.drift()
            self._timeline.tick(stream)
            goes_out = isinstance(destination, np.ndarray)
            what = "copy out" if goes_out else "copy back"
            device = source if goes_out else destination
            if goes_out:
                self._simulation.swapped_bytes += len(device)
            start = device.start
            self.check(stream, device.storage_address, start, start + len(device), is_write=not goes_out, what=what)
            self._judge.touch(
                stream, device.storage_address, start, start + len(device), is_write=not goes_out, what=what
            )
            self._timeline.enqueue(stream, _Copy(self, destination, source))

    def check(self, stream: SimulatedStream, key: int, start: int, end: int, *, is_write: bool, what: str) -> None:
        """Raise when a touch is not ordered after an earlier one."""
        known = self._judge.conflict(stream, key, start, end, is_write=is_write)
        if known is not None:
            raise SimulationError(
                f"simulated accelerator: {what} on {stream.name} {'writes' if is_write else 'reads'} bytes that {known.what} on "
                f"{known.stream} {'writes' if known.is_write else 'reads'}, and nothing orders the one after the other"
            )

    def touch(self, key: int, nbytes: int, *, is_write: bool, what: str) -> None:
        """The compute stream touches a device storage."""
        with self._timeline.lock:
            compute = self._timeline.compute
            self._timeline.tick(compute)
            self._judge.touch(compute, key, 0, max(1, nbytes), is_write=is_write, what=what)

    def watched(self, array: Any) -> DeviceBytes:  # numpy.ndarray of uint8
        """An array as device memory: counted from now on until nobody holds it (see "lives of storages")."""
        nbytes = int(array.nbytes)
        tensor = mindspore.Tensor.from_numpy(array)
        key = storage_key(tensor)
        with self._timeline.lock:
            self._arrays[key] = weakref.ref(array, lambda _: self._died(key, nbytes))
            self._simulation.count(nbytes)
            self._judge.forget(key)
        return DeviceBytes(tensor, 0, nbytes)

    def array_at(self, key: int) -> weakref.ref[Any] | None:
        """The watched array at an address, if there is one."""
        return self._arrays.get(key)

    def _died(self, key: int, nbytes: int) -> None:
        with self._timeline.lock:
            self._arrays.pop(key, None)
            self._simulation.count(-nbytes)
            known = self._judge.conflict(self._timeline.compute, key, 0, max(1, nbytes), is_write=True)
            if known is not None:
                self._judge.blame(
                    f"simulated accelerator: device bytes were let go while {known.what} on {known.stream} may still "
                    "be using them"
                )
            self._judge.forget(key)


class _Copy:
    """One queued copy. Its device side is held weakly where its life is known: only the engine's reference keeps it."""

    __slots__ = ("_array", "_device", "_goes_out", "_host", "_span")

    def __init__(self, backend: SimulatedBackend, destination: Any, source: Any) -> None:
        self._goes_out = isinstance(destination, np.ndarray)
        device, self._host = (source, destination) if self._goes_out else (destination, source)
        self._array = backend.array_at(device.storage_address)
        self._device = device if self._array is None else None
        self._span = slice(device.start, device.start + len(device))

    def __call__(self) -> None:
        if self._array is None:
            device = as_array(self._device)
        else:
            whole = self._array()
            if whole is None:
                return  # blamed when it died
            device = whole[self._span]
        if self._goes_out:
            np.copyto(self._host, device)
        else:
            np.copyto(device, self._host)


class _Watch(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Sees every op of this thread."""

    def __init__(self, backend: SimulatedBackend, simulation: Simulation) -> None:
        self._backend = backend
        self._simulation = simulation

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        if not is_seen():
            return func(*args)
        self._simulation.timeline.drift()
        self._simulation.raise_violations()
        facts = facts_of(func.name)
        output = func(*args)
        compat.wait_for_ops()
        reason = replay_reason(facts, args, output)
        inputs = [tensor for tensor in tensors_in(args) if tensor.size]
        compute = self._simulation.timeline.compute
        for position, tensor in enumerate(inputs):
            key, nbytes = storage_key(tensor), int(tensor.untyped_storage().nbytes())
            if not facts.is_ignored and reason != "view":
                # A user's in-place change races with a copy out on any device; the engine must answer for it by itself.
                self._backend.check(compute, key, 0, max(1, nbytes), is_write=False, what=func.name)
            is_written = facts.writes_first and position == 0
            self._backend.touch(key, nbytes, is_write=is_written, what=func.name)
        return self._moved(output, {storage_key(tensor) for tensor in inputs}, func.name)

    def _moved(self, output: Any, shared: set[int], what: str) -> Any:
        """The same output in watched memory, but for what lies in an input's storage."""
        if isinstance(output, tuple | list):
            return type(output)(self._moved(item, shared, what) for item in output)
        if not isinstance(output, mindspore.Tensor) or output.size == 0 or storage_key(output) in shared:
            return output
        # An older primitive was recorded inside ``func``: its output has a past, which the moved one must not lose.
        return _Moved.apply(output, self, what) if output._requires_grad else self.move(output, what)

    def move(self, tensor: Any, what: str) -> Any:
        """A copy in watched memory."""
        flat = self._backend.watched(as_array(flat_bytes(tensor)).copy())
        self._backend.touch(flat.storage_address, len(flat), is_write=True, what=what)
        kind = numpy_dtype(tensor.dtype)
        if kind is None or not tensor.is_contiguous() or tensor.nbytes != len(flat):
            return ViewSpec(tensor).over(flat)
        # Where it can be, not a view: MindSpore does not join a view to a graph of the second order.
        return mindspore.Tensor.from_numpy(flat.tensor.asnumpy().view(kind).reshape(tuple(tensor.shape)))


class _Moved(compat.Function):  # type: ignore[misc]
    """A tensor in watched memory, with the same gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, watch: _Watch, what: str) -> Any:
        """Move it."""
        return watch.move(tensor, what)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """The same."""
        return gradient, None, None


@contextlib.contextmanager
def simulate(timing: str, seed: int) -> Iterator[Simulation]:
    """See ``hyper_parallel.testing.simulated_accelerator``."""
    simulation = Simulation(timing, seed)
    backend = SimulatedBackend(simulation)
    manager = SwapManager()
    key = (SIMULATED, CPU)
    outer = manager.backends.get(key)
    manager.backends[key] = backend
    outer_trace, manager.counters.trace = manager.counters.trace, simulation.trace
    try:
        with _Watch(backend, simulation):
            yield simulation
        simulation.timeline.drain()
        simulation.raise_violations()
    finally:
        manager.counters.trace = outer_trace
        manager.forget_backend(backend)
        if outer is not None:
            manager.backends[key] = outer
