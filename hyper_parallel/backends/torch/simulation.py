"""The simulated accelerator on torch: CPU tensors as device memory (see ``hyper_parallel.testing``).

A dispatch mode sees every op of this thread: it counts the bytes of every storage an op creates or touches, and asks the
judge whether each touch is ordered after the copies. Buffers are poisoned when they are allocated. A copy that waits to
run holds its device side weakly, as a real copy does: when the last holder lets go too early, that is noticed.

Note: objects that outlive their bytes
    A storage's death is seen through its Python object. In torch 2.8 that object lives on, without bytes, while any
    ``StorageWeakRef`` names the storage, and the engine keeps some. There, every stored reference is looked at before an op, an
    event, a copy and a count (``compat.OBJECT_OUTLIVES_STORAGE``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.devices import profiler_range
from hyper_parallel.backends.torch.ops import facts_of
from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.torch import compat
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
        self._device_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        if compat.OBJECT_OUTLIVES_STORAGE:
            simulation.count_freed_bytes = self.count_freed_storages

    @property
    def simulation(self) -> Simulation:
        """The device that is played, for those who read its bytes and clock."""
        return self._simulation

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
            self._simulation.count_freed_bytes()
            stream = self._timeline.lane_of(stream)
            self._timeline.drift()
            return self._timeline.record(stream)

    def wait_event(self, stream: Stream, event: SimulatedEvent) -> None:
        """See the protocol."""
        self._simulation.count_freed_bytes()
        self._timeline.drift()
        self._timeline.wait(self._timeline.lane_of(stream), event)

    def event_is_done(self, event: SimulatedEvent) -> bool:
        """See the protocol."""
        self._timeline.drift()
        return self._timeline.is_done(event)

    def synchronize_event(self, event: SimulatedEvent) -> None:
        """See the protocol."""
        self._simulation.count_freed_bytes()
        self._timeline.synchronize(event)

    def elapsed_us(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        """See the protocol; simulated time has no length."""
        return 0.0

    def allocate(self, nbytes: int) -> FlatBytes:
        """See the protocol."""
        with unseen():
            buffer = torch.full((nbytes,), _POISON, dtype=torch.uint8)
        # An allocator may hand out a block whose last kernels still run: taking it is a touch.
        self.touch(buffer.untyped_storage(), is_write=True, what="allocation")
        return buffer

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
        with unseen():
            return torch.full((nbytes,), _POISON, dtype=torch.uint8)

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(flat.numpy())

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol."""
        with self._timeline.lock:
            self._copy(destination, source, self._timeline.lane_of(stream))

    def _copy(self, destination: FlatBytes, source: FlatBytes, stream: SimulatedStream) -> None:
        timeline = self._timeline
        self._simulation.count_freed_bytes()
        timeline.drift()
        timeline.tick(stream)
        goes_out = destination.untyped_storage()._cdata not in self._device_storages
        if goes_out:
            self._simulation.swapped_bytes += source.nbytes
        self._claim(stream, source, is_write=False, what="copy out" if goes_out else "copy back")
        self._claim(stream, destination, is_write=True, what="copy out" if goes_out else "copy back")
        with profiler_range(goes_out=goes_out), torch._C._DisableTorchDispatch():
            timeline.enqueue(stream, _Copy(self, destination, source, goes_out=goes_out))

    def _claim(self, stream: SimulatedStream, flat: FlatBytes, *, is_write: bool, what: str) -> None:
        key, start = flat.untyped_storage()._cdata, flat.storage_offset()
        self.check(stream, key, start, start + flat.nbytes, is_write=is_write, what=what)
        self._judge.touch(stream, key, start, start + flat.nbytes, is_write=is_write, what=what)

    def check(self, stream: SimulatedStream, key: int, start: int, end: int, *, is_write: bool, what: str) -> None:
        """Raise when a touch is not ordered after an earlier one."""
        known = self._judge.conflict(stream, key, start, end, is_write=is_write)
        if known is not None:
            raise SimulationError(
                f"simulated accelerator: {what} on {stream.name} {'writes' if is_write else 'reads'} bytes that {known.what} on "
                f"{known.stream} {'writes' if known.is_write else 'reads'}, and nothing orders the one after the other"
            )

    def touch(self, storage: torch.UntypedStorage, *, is_write: bool, what: str) -> None:
        """The compute stream touches a device storage: count it when it is new, and note the touch."""
        key, nbytes = storage._cdata, storage.nbytes()
        with self._timeline.lock:
            self._simulation.count_freed_bytes()
            if key not in self._device_storages:
                self._device_storages[key] = weakref.ref(storage, lambda _: self._died(key, nbytes))
                self._simulation.count(nbytes)
                self._judge.forget(key)
            compute = self._timeline.compute
            self._timeline.tick(compute)
            self._judge.touch(compute, key, 0, max(1, nbytes), is_write=is_write, what=what)

    def count_freed_storages(self) -> None:
        """Count the deaths that no object told of (see "objects that outlive their bytes")."""
        with self._timeline.lock:
            for key, reference in list(self._device_storages.items()):
                storage = reference()
                if storage is not None and compat.is_freed(storage):
                    self._died(key, storage.nbytes())

    def _died(self, key: int, nbytes: int) -> None:
        with self._timeline.lock:
            if self._device_storages.pop(key, None) is None:
                return
            self._simulation.count(-nbytes)
            known = self._judge.conflict(self._timeline.compute, key, 0, max(1, nbytes), is_write=True)
            if known is not None:
                self._judge.blame(
                    f"simulated accelerator: device bytes were let go while {known.what} on {known.stream} may still "
                    "be using them"
                )
            self._judge.forget(key)


class _Copy:
    """One queued copy. Its device side is held weakly: only the engine's own reference keeps it."""

    __slots__ = ("_backend", "_device", "_goes_out", "_host", "_span")

    def __init__(self, backend: SimulatedBackend, destination: FlatBytes, source: FlatBytes, *, goes_out: bool) -> None:
        device, self._host = (source, destination) if goes_out else (destination, source)
        self._backend = backend
        self._goes_out = goes_out
        self._device = weakref.ref(device.untyped_storage())
        self._span = device.storage_offset(), device.numel()

    def __call__(self) -> None:
        storage = self._device()
        if storage is None or compat.is_freed(storage):
            return  # blamed when it died
        with unseen():
            device = torch.empty(0, dtype=torch.uint8).set_(storage)[self._span[0] : self._span[0] + self._span[1]]
            if self._goes_out:
                self._host.copy_(device)
            else:
                device.copy_(self._host)


class _Watch(TorchDispatchMode):
    """Sees every op of this thread."""

    supports_higher_order_operators = True

    def __init__(self, backend: SimulatedBackend, simulation: Simulation) -> None:
        super().__init__()
        self._backend = backend
        self._simulation = simulation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside a region stays compiled: dynamo would otherwise skip every frame under a foreign mode."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._simulation.count_freed_bytes()
        self._simulation.timeline.drift()
        self._simulation.raise_violations()
        compute = self._simulation.timeline.compute
        facts = facts_of(op)
        written = {id(_argument(args, kwargs, at)) for at in facts.writes}
        inputs = [leaf for leaf in _tensors((args, kwargs)) if _has_storage(leaf)]
        if not facts.is_ignored and facts.replay_reason != "view":
            for tensor in inputs:
                storage = tensor.untyped_storage()
                # A user's in-place change races with a copy out on any device; the engine must answer for it by itself.
                self._backend.check(compute, storage._cdata, 0, max(1, storage.nbytes()), is_write=False, what=str(op))
        output = op(*args, **kwargs)
        for tensor in inputs:
            self._backend.touch(tensor.untyped_storage(), is_write=id(tensor) in written, what=str(op))
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(output):
            if _has_storage(tensor):
                storage = tensor.untyped_storage()
                self._backend.touch(storage, is_write=storage._cdata not in shared, what=str(op))
        return output


def _argument(args: Any, kwargs: dict[str, Any], at: int | str) -> Any:
    if isinstance(at, str):
        return kwargs.get(at)
    return args[at] if at < len(args) else None


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for item in tree for tensor in _tensors(item)]


def _has_storage(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
    )


@contextlib.contextmanager
def simulate(timing: str, seed: int) -> Iterator[Simulation]:
    """See ``hyper_parallel.testing.simulated_accelerator``."""
    simulation = Simulation(timing, seed)
    backend = SimulatedBackend(simulation)
    manager = SwapManager()
    key = ("torch simulated", "cpu")
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
