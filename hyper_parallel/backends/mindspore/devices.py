"""MindSpore devices as the engine sees them: an Ascend with real streams, or host memory with a file behind it."""

from __future__ import annotations

import contextlib
import ctypes
import time
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
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU

__all__ = ["SIMULATED", "AscendBackend", "HostBackend", "as_array", "backend_for", "copied"]

SIMULATED = "mindspore simulated"
"""Under this name the manager keeps the backend of a simulation."""


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


class AscendBackend:
    """One Ascend. Written against MindSpore's documentation; no Ascend has run it yet."""

    is_host_memory = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._kind = name.partition(":")[0]

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """See the protocol."""
        return unseen()

    def current_stream(self) -> Stream:
        """See the protocol."""
        return mindspore.runtime.current_stream()

    def new_stream(self) -> Stream:
        """See the protocol."""
        return mindspore.runtime.Stream()

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """See the protocol."""
        event = mindspore.runtime.Event(enable_timing=timing)
        event.record(stream)
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See the protocol."""
        stream.wait_event(event)

    def event_is_done(self, event: Event) -> bool:
        """See the protocol."""
        return bool(event.query())

    def synchronize_event(self, event: Event) -> None:
        """See the protocol."""
        event.synchronize()

    def elapsed_us(self, start: Event, end: Event) -> float:
        """See the protocol."""
        return float(start.elapsed_time(end)) * 1e3

    def allocate(self, nbytes: int) -> FlatBytes:
        """See the protocol."""
        return DeviceBytes(mint.empty((nbytes,), dtype=mindspore.uint8, device=self._kind), 0, nbytes)

    def dropped(self, nbytes: int) -> None:
        """See the protocol; MindSpore's pool reuses what it gets back."""

    def held_bytes(self) -> int | None:
        """See the protocol."""
        return int(mindspore.runtime.memory_allocated())

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol; MindSpore has no class for it."""
        return isinstance(error, RuntimeError) and "memory" in str(error).lower()

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """See the protocol."""
        try:
            buffer = mint.empty((nbytes,), dtype=mindspore.uint8, device=CPU, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(f"{self.name}: the host refused {nbytes} bytes of {'pinned ' * pinned}memory") from error
        return DeviceBytes(buffer, 0, nbytes)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol."""
        with unseen(), mindspore.runtime.StreamCtx(stream):
            destination.as_tensor().copy_(source.as_tensor(), non_blocking=True)

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(as_array(flat))


class HostBackend:
    """Host memory as the device: ops run in order, so order is program order and only files are asynchronous."""

    is_host_memory = True
    name = "cpu"

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """See the protocol."""
        return unseen()

    def current_stream(self) -> Stream:
        """See the protocol."""
        return None

    def new_stream(self) -> Stream:
        """See the protocol."""
        return None

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """See the protocol. Files are written behind MindSpore's back, so its queue of ops must be empty here."""
        compat.wait_for_ops()
        return time.perf_counter_ns()

    def wait_event(self, stream: Stream, event: Event) -> None:
        """See the protocol."""

    def event_is_done(self, event: Event) -> bool:
        """See the protocol."""
        return True

    def synchronize_event(self, event: Event) -> None:
        """See the protocol."""

    def elapsed_us(self, start: Event, end: Event) -> float:
        """See the protocol."""
        return float(end - start) / 1e3

    def allocate(self, nbytes: int) -> FlatBytes:
        """See the protocol."""
        return DeviceBytes(mint.empty((nbytes,), dtype=mindspore.uint8), 0, nbytes)

    def dropped(self, nbytes: int) -> None:
        """See the protocol; MindSpore's pool reuses what it gets back, and gives none of it to the system."""

    def held_bytes(self) -> int | None:
        """See the protocol; on the CPU MindSpore counts none."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol."""
        return isinstance(error, MemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """See the protocol; nothing here is page-locked."""
        return np.empty(nbytes, dtype=np.uint8)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol."""
        compat.wait_for_ops()
        np.copyto(as_array(destination), as_array(source))

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(as_array(flat))


def backend_for(device: str, config: SwapConfig) -> DeviceBackend | None:
    """The device's backend; None where its tensors are already in host memory and no file was named for them."""
    manager = SwapManager()
    simulated = manager.backends.get((SIMULATED, device))
    if simulated is not None:
        return simulated
    if device == "meta" or (device == CPU and "disk" not in config.tiers):
        return None
    key = ("mindspore", device)
    backend: DeviceBackend | None = manager.backends.get(key)
    if backend is None:
        backend = HostBackend() if device == CPU else AscendBackend(device)
        backend = manager.backends.setdefault(key, backend)
    return backend
