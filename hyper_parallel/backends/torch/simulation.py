"""The simulated accelerator on torch: storages as device memory, and a mode that sees every op.

The device itself is in ``hyper_parallel/simulation/backend.py``. A dispatch mode sees every op of this thread and tells the
device of every storage that the op creates or touches. A storage's Python object dies when the last tensor over it does.

Note: objects that outlive their bytes
    In torch 2.8 a storage's Python object lives on, without bytes, while any ``StorageWeakRef`` names the storage, and the
    engine keeps some. There, every counted storage is looked at before an op, an event, a copy and a count
    (``compat.OBJECT_OUTLIVES_STORAGE``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hyper_parallel.backends.torch.devices import hide_from_modes, host_view, profiler_range
from hyper_parallel.backends.torch.ops import facts_of, move_versions
from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes
from hyper_parallel.platform.torch import compat
from hyper_parallel.simulation.backend import POISON, ByteRange, SimulatedBackend, simulate_device
from hyper_parallel.simulation.simulation import Simulation

__all__ = ["simulate"]


class _Memory:
    """See :class:`~hyper_parallel.simulation.backend.SimulatedMemory`."""

    framework = "torch"
    host_kind = "cpu"
    object_outlives_bytes = compat.OBJECT_OUTLIVES_STORAGE
    unseen = staticmethod(hide_from_modes)
    host_view = staticmethod(host_view)
    is_freed = staticmethod(compat.is_freed)

    def watch(self, backend: SimulatedBackend) -> _Watch:
        """The mode; it sees this thread's ops."""
        return _Watch(backend)

    def new_device_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """A tensor, and its storage."""
        with unseen():
            flat = torch.full((nbytes,), POISON, dtype=torch.uint8)
        return flat, flat.untyped_storage()

    def new_host_bytes(self, nbytes: int) -> tuple[FlatBytes, object]:
        """The same. The caller may be in an inference block; far memory outlives it, and is written outside it."""
        with torch.inference_mode(False):
            return self.new_device_bytes(nbytes)

    def range_of(self, flat: FlatBytes) -> ByteRange:
        """The key of a storage is the address of its C++ object."""
        start = flat.storage_offset()
        return ByteRange(flat.untyped_storage()._cdata, start, start + flat.nbytes)

    def hold_weakly(self, flat: FlatBytes, owner: weakref.ref[Any] | None) -> Callable[[], FlatBytes | None]:
        """The storage is held weakly, counted or not."""
        reference, part = weakref.ref(flat.untyped_storage()), self.range_of(flat)

        def again() -> FlatBytes | None:
            storage = reference()
            if storage is None or compat.is_freed(storage):
                return None
            return torch.empty(0, dtype=torch.uint8).set_(storage)[part.start : part.end]

        return again

    def copy_now(self, destination: FlatBytes, source: FlatBytes) -> None:
        """One op, unseen by modes."""
        destination.copy_(source)

    @contextlib.contextmanager
    def around_queueing(self, *, goes_out: bool) -> Iterator[None]:
        """A range in torch's profiler, as around the copies of a real device."""
        with profiler_range(goes_out=goes_out), torch._C._DisableTorchDispatch():
            yield


class _Watch(TorchDispatchMode):
    """Sees every op of this thread."""

    supports_higher_order_operators = True

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside a region stays compiled: dynamo would otherwise skip every frame under a foreign mode."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._backend.before_op()
        facts = facts_of(op)
        written = {id(tensor) for at in facts.writes for tensor in _tensors(_argument(args, kwargs, at))}
        inputs = [leaf for leaf in _tensors((args, kwargs)) if _has_storage(leaf)]
        if not facts.is_ignored and facts.replay_reason != "view":
            for tensor in inputs:
                storage = tensor.untyped_storage()
                self._backend.check_read(storage._cdata, storage.nbytes(), what=str(op))
        output = op(*args, **kwargs)
        if self._backend.has_clock and facts.replay_reason != "view" and not facts.is_ignored:
            self._backend.run_op(_flops(op, args, kwargs, output), sum(map(_nbytes, (*inputs, *_tensors(output)))))
        if facts.writes_lists:
            move_versions(facts, args, kwargs)
        for tensor in inputs:
            self._touch(tensor.untyped_storage(), is_write=id(tensor) in written, what=str(op))
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(output):
            if _has_storage(tensor):
                storage = tensor.untyped_storage()
                self._touch(storage, is_write=storage._cdata not in shared, what=str(op))
        return output

    def _touch(self, storage: torch.UntypedStorage, *, is_write: bool, what: str) -> None:
        self._backend.touch(storage._cdata, storage.nbytes(), owner=storage, is_write=is_write, what=what)


def _flops(op: Any, args: Any, kwargs: dict[str, Any], output: Any) -> int:
    """What torch counts for matmuls, convolutions and attention; 0 for other ops."""
    count = flop_registry.get(getattr(op, "overloadpacket", None))
    return 0 if count is None else int(count(*args, **kwargs, out_val=output))


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


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


def simulate(timing: str, seed: int) -> contextlib.AbstractContextManager[Simulation]:
    """See ``hyper_parallel.testing.simulated_accelerator``."""
    return simulate_device(_Memory(), timing, seed)
