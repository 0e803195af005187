"""MindSpore devices as the engine sees them: an Ascend with real streams, or host memory with a file behind it."""

from __future__ import annotations

import ctypes
from typing import Any

import mindspore
import numpy as np
from mindspore import mint

from hyper_parallel.backends.mindspore.storages import (
    DeviceBytes,
    ViewSpec,
    alias,
    flat_bytes,
    unseen,
)
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Event, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.devices import HostDevice, StreamDevice, find_backend, host_refused
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU

__all__ = ["AscendBackend", "HostBackend", "as_array", "backend_for", "copied", "host_view"]


def as_array(flat: DeviceBytes | Any) -> Any:  # numpy.ndarray of uint8; a host buffer is one already
    """Bytes in host memory as an array without a copy; it keeps them alive."""
    if isinstance(flat, np.ndarray):
        return flat
    cells = (ctypes.c_ubyte * len(flat)).from_address(flat.address)
    cells.owner = flat.tensor  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(cells), dtype=np.uint8)


def copied(tensor: Any) -> Any:
    """The same tensor over bytes of its own.

    ``Tensor.copy`` is arithmetic: it divides by one or adds nothing, which a cell with ``to_float`` does in half precision
    and which loses the sign of a complex zero. And an older primitive that a mode answers for waits for its result for ever.
    """
    flat = flat_bytes(tensor)
    if len(flat) == 0:
        return alias(tensor)
    with unseen():
        if str(tensor.device) == CPU:
            compat.wait_for_ops()
            buffer = mindspore.Tensor.from_numpy(as_array(flat).copy())
        else:
            buffer = mint.empty((len(flat),), dtype=mindspore.uint8, device=str(tensor.device).partition(":")[0])
            buffer.copy_(flat.as_tensor())
    return ViewSpec(tensor).over(DeviceBytes(buffer, 0, len(flat)))


def host_view(flat: FlatBytes) -> memoryview:
    """Bytes in host memory, writable and without a copy."""
    return memoryview(as_array(flat))


class AscendBackend(StreamDevice):
    """One Ascend. Written against MindSpore's documentation; no Ascend has run it yet."""

    unseen = staticmethod(unseen)
    host_view = staticmethod(host_view)

    def __init__(self, name: str) -> None:
        super().__init__(name, mindspore.runtime.Event)
        self._kind = name.partition(":")[0]

    def current_stream(self) -> Stream:
        """The calling thread's stream."""
        return mindspore.runtime.current_stream()

    def new_stream(self) -> Stream:
        """A stream of the current device."""
        return mindspore.runtime.Stream()

    def allocate(self, nbytes: int) -> FlatBytes:
        """Bytes of MindSpore's pool."""
        return DeviceBytes(mint.empty((nbytes,), dtype=mindspore.uint8, device=self._kind), 0, nbytes)

    def held_bytes(self) -> int | None:
        """What MindSpore's pool has given out."""
        return int(mindspore.runtime.memory_allocated())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether the text names memory; MindSpore has no class for a full device."""
        return isinstance(error, RuntimeError) and "memory" in str(error).lower()

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """Bytes of a CPU tensor, page-locked where asked."""
        try:
            buffer = mint.empty((nbytes,), dtype=mindspore.uint8, device=CPU, pin_memory=pinned)
        except RuntimeError as error:
            raise host_refused(self.name, nbytes, pinned=pinned) from error
        return DeviceBytes(buffer, 0, nbytes)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Queue the copy on ``stream``."""
        with unseen(), mindspore.runtime.StreamCtx(stream):
            destination.as_tensor().copy_(source.as_tensor(), non_blocking=True)


class HostBackend(HostDevice):
    """Host memory as the device."""

    unseen = staticmethod(unseen)
    host_view = staticmethod(host_view)

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """The time now, after MindSpore's queue of ops has run: files are written without its knowledge."""
        compat.wait_for_ops()
        return super().record_event(stream, timing=timing)

    def allocate(self, nbytes: int) -> FlatBytes:
        """Bytes of MindSpore's pool."""
        return DeviceBytes(mint.empty((nbytes,), dtype=mindspore.uint8), 0, nbytes)

    def dropped(self, nbytes: int) -> None:
        """Nothing to do: MindSpore's pool reuses what it gets back, and returns none of it to the system."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether Python says that the host has no memory."""
        return isinstance(error, MemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """An array; it is not page-locked."""
        return np.empty(nbytes, dtype=np.uint8)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Copy at once, after MindSpore's queue of ops has run."""
        compat.wait_for_ops()
        np.copyto(as_array(destination), as_array(source))


def backend_for(device: str, config: SwapConfig) -> DeviceBackend | None:
    """The device's backend; None where its tensors are already in host memory and no file was named for them."""
    return find_backend("mindspore", device, config, host_kind=CPU, name=lambda: device, make=_make_backend)


def _make_backend(name: str) -> DeviceBackend:
    return HostBackend() if name == CPU else AscendBackend(name)
