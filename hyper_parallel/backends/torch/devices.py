"""Torch devices as the engine sees them: an accelerator with real streams, or host memory with a file behind it."""

from __future__ import annotations

import contextlib
import ctypes
import time
import weakref
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Event, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.far.disk_file import aligned_memory
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import CaptureError

__all__ = ["AcceleratorBackend", "HostBackend", "backend_for", "profiler_range", "refuse_capture"]


_TRIM_EVERY_BYTES: Final = 32 * 2**20
_MAP_FROM_BYTES: Final = 2**20
_TENSOR_RESIDUE_BYTES: Final = 64  # where torch's own tensors begin in a page, if the C allocator mapped them


class AcceleratorBackend:
    """One accelerator of any vendor that torch names a device module for (``torch.cuda``, ``torch.npu``, ``torch.xpu``)."""

    is_host_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = str(device)
        self._module: Any = torch.get_device_module(device)  # torch.cuda | torch.npu | torch.xpu
        self._streams: dict[Any, Stream] = {}  # by what the driver's question answers; streams of a process are few

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """See the protocol."""
        return unseen()

    def current_stream(self) -> Stream:
        """See the protocol. Torch builds a new object for each answer, at twenty times the cost of the bare question."""
        if self.device.type != "cuda":
            return self._module.current_stream(self.device)
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._module.current_stream(self.device)
        return stream

    def new_stream(self) -> Stream:
        """See the protocol."""
        return self._module.Stream(device=self.device)

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """See the protocol."""
        event = self._module.Event(enable_timing=timing)
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
        with torch._C._DisableTorchDispatch():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def held_bytes(self) -> int | None:
        """See the protocol. The public question builds a table of every statistic, at ten times the cost."""
        if self.device.type == "cuda":
            statistics = torch._C._cuda_memoryStats(self.device.index)
            return int(statistics["allocated_bytes"]["all"]["current"])
        return int(self._module.memory_allocated(self.device))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol."""
        return isinstance(error, torch.OutOfMemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """See the protocol. Page-locks a block of exactly this size: torch's own pinned cache rounds to powers of two."""
        with torch._C._DisableTorchDispatch():
            try:
                if not pinned:
                    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                if self.device.type == "cuda":
                    return _page_locked(nbytes)
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                raise MemoryError(
                    f"{self.name}: the host refused {nbytes} bytes of {'pinned ' * pinned}memory"
                ) from error

    def dropped(self, nbytes: int) -> None:
        """See the protocol; the caching allocator reuses what it gets back."""

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol. The record that moves its bytes has made itself unseen."""
        with profiler_range(goes_out=destination.device.type == "cpu"), self._on(stream):
            destination.copy_(source, non_blocking=True)

    def _on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "cuda" and torch._C._cuda_getDevice() == self.device.index:
            return _CurrentStream(self, stream)
        switched: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return switched

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(flat.numpy())


class _CurrentStream:
    """``torch.cuda.stream(stream)`` where the stream is on the current device, at an eighth of the cost."""

    __slots__ = ("_before", "_stream")

    def __init__(self, backend: AcceleratorBackend, stream: Stream) -> None:
        self._before = backend.current_stream()
        self._stream = stream

    def __enter__(self) -> None:
        _make_current(self._stream)

    def __exit__(self, *exc: object) -> None:
        _make_current(self._before)


def _make_current(stream: Stream) -> None:
    torch._C._cuda_setStream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _page_locked(nbytes: int) -> torch.Tensor:
    """Exactly ``nbytes`` of page-locked memory, unlocked again when the tensor's storage dies."""
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    runtime = torch.cuda.cudart()
    address = block.data_ptr()
    code = runtime.cudaHostRegister(address, nbytes, 0)
    if int(code) != 0:
        raise MemoryError(f"cudaHostRegister refused {nbytes} bytes (code {int(code)})")
    weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, address)
    return block


class HostBackend:
    """Host memory as the device: compute is synchronous, so order is program order and only files are asynchronous."""

    is_host_memory = True
    name = "cpu"

    def __init__(self) -> None:
        self._dropped_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only

    def dropped(self, nbytes: int) -> None:
        """See the protocol. The C allocator keeps what it was given back; what swapping frees must leave the process."""
        self._dropped_bytes += nbytes
        if self._trim is not None and self._dropped_bytes >= _TRIM_EVERY_BYTES:
            self._dropped_bytes = 0
            self._trim(0)

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
        """See the protocol."""
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
        return self.allocate_at(nbytes, residue_bytes=_TENSOR_RESIDUE_BYTES)

    def allocate_at(self, nbytes: int, *, residue_bytes: int) -> FlatBytes:
        """Bytes in a mapping of their own, so that a file is read straight into them and dropping them frees them."""
        with torch._C._DisableTorchDispatch():
            if nbytes < _MAP_FROM_BYTES:  # a small copy costs less than a mapping
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return torch.frombuffer(aligned_memory(nbytes, residue_bytes=residue_bytes), dtype=torch.uint8)

    def held_bytes(self) -> int | None:
        """See the protocol; the process's resident bytes are no tensor's, and dear to ask for."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """See the protocol."""
        return self.allocate(nbytes)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """See the protocol."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            destination.copy_(source)

    def host_view(self, flat: FlatBytes) -> memoryview:
        """See the protocol."""
        return memoryview(flat.numpy())


_NO_RANGE: Final = contextlib.nullcontext()


def profiler_range(*, goes_out: bool) -> contextlib.AbstractContextManager[Any]:
    """A range in torch's profiler around the queueing of a copy; nothing where no profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    return torch.profiler.record_function(f"hyper_parallel: copy {'out' if goes_out else 'back'}")


def backend_for(device: torch.device, config: SwapConfig) -> DeviceBackend | None:
    """The device's backend; None where its tensors are already in host memory and no file was named for them."""
    manager = SwapManager()
    simulated = manager.backends.get(("torch simulated", device.type))
    if simulated is not None:
        return simulated
    if device.type in ("meta", "cpu") and not (device.type == "cpu" and "disk" in config.tiers):
        return None
    index: int | None = device.index
    if device.type != "cpu" and index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    key = ("torch", str(device))
    backend: DeviceBackend | None = manager.backends.get(key)
    if backend is None:
        backend = HostBackend() if device.type == "cpu" else AcceleratorBackend(device)
        backend = manager.backends.setdefault(key, backend)
    return backend


def refuse_capture(where: str) -> None:
    """Raise while a device graph is being captured: a replay of it would reuse buffers that this step lent and took back."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{where}: cannot swap or replay activations while a CUDA graph is captured, because the captured copies would "
            "be repeated with buffers that belong to this step only. Capture a part of the model without an active region, "
            "or leave the wrapper off it."
        )
