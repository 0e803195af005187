"""The simulated accelerator on MindSpore: arrays as device memory, and a mode that sees every op.

The device itself is in ``hyper_parallel/simulation/backend.py``. A dispatch mode sees every op of this thread and tells the
device of every storage that the op creates or touches.

Note: lives of storages
    MindSpore does not tell when a storage dies. So the mode moves the output of every op into memory of an array that
    it watches: a tensor made of an array keeps it alive as long as anything holds the tensor, also the graph. Bytes
    that ops make and buffers that loads fill are thus counted exactly. The older primitives save before they return,
    so what such an op saves of its own output (a dropout's mask) stays in memory of MindSpore's own, as do tensors
    that no op made, such as weights and batches: these are checked, and not counted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np

from hyper_parallel.backends.mindspore.devices import as_array, host_view
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
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU
from hyper_parallel.simulation.backend import POISON, ByteRange, SimulatedBackend, simulate_device
from hyper_parallel.simulation.simulation import Simulation

__all__ = ["simulate"]


def _over(array: Any) -> DeviceBytes:  # numpy.ndarray of uint8
    """An array as device memory; the tensor in it keeps the array alive."""
    return DeviceBytes(mindspore.Tensor.from_numpy(array), 0, int(array.nbytes))


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


class _Memory:
    """See :class:`~hyper_parallel.simulation.backend.SimulatedMemory`."""

    framework = "mindspore"
    host_kind = CPU
    object_outlives_bytes = False
    unseen = staticmethod(unseen)
    host_view = staticmethod(host_view)

    def watch(self, backend: SimulatedBackend) -> _Watch:
        """The mode; it sees this thread's ops."""
        return _Watch(backend)

    def new_device_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """A tensor over an array, and the array."""
        array = np.full(nbytes, POISON, dtype=np.uint8)
        return _over(array), array

    def new_host_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """An array, which owns itself."""
        array = np.full(nbytes, POISON, dtype=np.uint8)
        return array, array

    def range_of(self, flat: FlatBytes) -> ByteRange:
        """The key of a storage, or of a whole array, is its address."""
        if isinstance(flat, DeviceBytes):
            return ByteRange(flat.storage_address, flat.start, flat.start + len(flat))
        key = _address(flat.base if isinstance(flat.base, np.ndarray) else flat)
        start = _address(flat) - key
        return ByteRange(key, start, start + len(flat))

    def hold_weakly(self, flat: FlatBytes, owner: weakref.ref[Any] | None) -> Callable[[], FlatBytes | None]:
        """A counted array is held weakly; what MindSpore does not tell the life of is held."""
        if owner is None:
            return lambda: as_array(flat)
        part = self.range_of(flat)

        def again() -> FlatBytes | None:
            array = owner()
            return None if array is None else array[part.start : part.end]

        return again

    def is_freed(self, owner: Any) -> bool:
        """An array has its bytes as long as it lives."""
        return False

    def copy_now(self, destination: FlatBytes, source: FlatBytes) -> None:
        """Without MindSpore: both sides are arrays."""
        np.copyto(destination, source)

    def around_queueing(self, *, goes_out: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()


class _Watch(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Sees every op of this thread."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        if not is_seen():
            return func(*args)
        self._backend.before_op()
        facts = facts_of(func.name)
        output = func(*args)
        compat.wait_for_ops()
        reason = replay_reason(facts, args, output)
        inputs = [tensor for tensor in tensors_in(args) if tensor.size]
        for position, tensor in enumerate(inputs):
            key, nbytes = storage_key(tensor), int(tensor.untyped_storage().nbytes())
            if not facts.is_ignored and reason != "view":
                self._backend.check_read(key, nbytes, what=func.name)
            is_written = facts.writes_first and position == 0
            self._backend.touch(key, nbytes, owner=None, is_write=is_written, what=func.name)
        return self._moved(output, {storage_key(tensor) for tensor in inputs}, func.name)

    def _moved(self, output: Any, shared: set[int], what: str) -> Any:
        """The same output in watched memory, but for what lies in an input's storage."""
        if isinstance(output, tuple | list):
            return type(output)(self._moved(item, shared, what) for item in output)
        if not isinstance(output, mindspore.Tensor) or output.size == 0 or storage_key(output) in shared:
            return output
        # An older primitive was recorded inside ``func``: its output has autograd history, which the moved one must not lose.
        return _Moved.apply(output, self, what) if output._requires_grad else self.move(output, what)

    def move(self, tensor: Any, what: str) -> Any:
        """A copy in watched memory."""
        array = as_array(flat_bytes(tensor)).copy()
        flat = _over(array)
        self._backend.touch(flat.storage_address, len(flat), owner=array, is_write=True, what=what)
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


def simulate(timing: str, seed: int) -> contextlib.AbstractContextManager[Simulation]:
    """See ``hyper_parallel.testing.simulated_accelerator``."""
    return simulate_device(_Memory(), timing, seed)
