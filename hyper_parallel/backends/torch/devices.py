"""Torch devices as the engine sees them: an accelerator with real streams, or host memory with a file behind it."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from hyper_parallel.backends.torch import native
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.devices import HostDevice, StreamDevice, find_backend, host_refused
from hyper_parallel.core.activation_checkpoint.far.disk_file import aligned_memory
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import CaptureError

__all__ = [
    "AcceleratorBackend",
    "HostBackend",
    "allocator_retries",
    "backend_for",
    "device_peak_bytes",
    "hide_from_modes",
    "host_view",
    "profiler_range",
    "refuse_capture",
]

_TRIM_EVERY_BYTES: Final = 32 * 2**20
_MAP_FROM_BYTES: Final = 2**20
_TENSOR_RESIDUE_BYTES: Final = 64  # where torch's own tensors begin in a page, if the C allocator mapped them


def device_peak_bytes() -> int | None:
    """The most bytes that the current accelerator, or the simulated one, has held; None without one."""
    for (framework, _), backend in SwapManager().backends.items():
        simulation = getattr(backend, "simulation", None)
        if framework == "torch simulated" and simulation is not None:
            return int(simulation.peak_bytes)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return None


def allocator_retries() -> int:
    """How often the current accelerator's allocator found no memory, gave back what it kept, and asked again."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
    return 0


def hide_from_modes() -> contextlib.AbstractContextManager[None]:
    """A context in which no dispatch mode sees the ops of a device backend.

    No graph records them in any case: flat bytes never need a gradient. So the mode of gradients stays as it is, and nothing
    has to be put back when a signal ends the context half-way.
    """
    hidden: contextlib.AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return hidden


def host_view(flat: FlatBytes) -> memoryview:
    """The bytes of a tensor in host memory, writable and without a copy."""
    return memoryview(flat.numpy())


class AcceleratorBackend(StreamDevice):
    """One accelerator of any vendor that torch names a device module for (``torch.cuda``, ``torch.npu``, ``torch.xpu``)."""

    unseen = staticmethod(hide_from_modes)
    host_view = staticmethod(host_view)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)  # torch.cuda | torch.npu | torch.xpu
        self._extension: Any = native.load()  # the module, or None
        self._streams: dict[Any, Stream] = {}  # by the driver's own number of the stream; a process has few streams
        super().__init__(str(device), self._module.Event, reuses_events=device.type == "cuda")

    def current_stream(self) -> Stream:
        """The same object for the same stream: torch builds a new one per call, at twenty times the cost of the number."""
        if self.device.type != "cuda":
            return self._module.current_stream(self.device)
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self._module.current_stream(self.device)
        return stream

    def new_stream(self) -> Stream:
        """A stream of this device."""
        return self._module.Stream(device=self.device)

    def allocate(self, nbytes: int) -> FlatBytes:
        """Bytes of torch's caching allocator."""
        if not torch._C._len_torch_dispatch_stack():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        with torch._C._DisableTorchDispatch():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_all(self, sizes: Sequence[int]) -> list[FlatBytes]:
        """Bytes of torch's caching allocator, as many of the buffers as it has memory for."""
        if self._extension is None:
            return super().allocate_all(sizes)
        made: list[FlatBytes] = self._extension.allocate_all(sizes, self.device)
        return made

    def held_bytes(self) -> int | None:
        """What the caching allocator has given out. torch's public function builds a table first, at ten times the cost."""
        if self.device.type == "cuda":
            statistics = torch._C._cuda_memoryStats(self.device.index)
            return int(statistics["allocated_bytes"]["all"]["current"])
        return int(self._module.memory_allocated(self.device))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether it is torch's own class for a full device."""
        return isinstance(error, torch.OutOfMemoryError)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """Page-locks a block of exactly this size: torch's own pinned cache rounds to powers of two.

        The caller may be in an inference block; the memory outlives it, and is written outside it.
        """
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            try:
                if not pinned:
                    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                if self.device.type == "cuda":
                    return _page_locked(nbytes)
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                raise host_refused(self.name, nbytes, pinned=pinned) from error

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Queue the copy on ``stream``. The record that moves its bytes has entered ``unseen()``."""
        self.copy_all(((destination, source),), stream)

    def copy_all(self, copies: Sequence[tuple[FlatBytes, FlatBytes]], stream: Stream) -> None:
        """Queue the copies on ``stream``, behind one switch of streams. A profiler that runs is shown each of them."""
        if torch._C._autograd._profiler_enabled():
            with self.on_stream(stream):
                for destination, source in copies:
                    with profiler_range(goes_out=destination.device.type == "cpu"):
                        destination.copy_(source, non_blocking=True)
        elif self.device.type == "cuda" and self._is_current(stream):
            self._queue(copies)
        else:
            with self.on_stream(stream):
                self._queue(copies)

    def _queue(self, copies: Sequence[tuple[FlatBytes, FlatBytes]]) -> None:
        if self._extension is not None:
            self._extension.copy_all(copies)
            return
        for destination, source in copies:
            destination.copy_(source, non_blocking=True)

    def _is_current(self, stream: Stream) -> bool:
        """Whether a kernel that is launched now goes to ``stream`` of this CUDA device."""
        index = self.device.index
        current: tuple[int, int, int] = torch._C._cuda_getCurrentStream(index)
        return current[0] == stream.stream_id and torch._C._cuda_getDevice() == index

    def on_stream(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Make ``stream`` the current one inside."""
        if self.device.type == "cuda" and torch._C._cuda_getDevice() == self.device.index:
            return _CurrentStream(self, stream)
        switched: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return switched


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


class HostBackend(HostDevice):
    """Host memory as the device."""

    unseen = staticmethod(hide_from_modes)
    host_view = staticmethod(host_view)

    def __init__(self) -> None:
        self._dropped_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only

    def dropped(self, nbytes: int) -> None:
        """The C allocator keeps what it was given back; what swapping frees must leave the process."""
        self._dropped_bytes += nbytes
        if self._trim is not None and self._dropped_bytes >= _TRIM_EVERY_BYTES:
            self._dropped_bytes = 0
            self._trim(0)

    def allocate(self, nbytes: int) -> FlatBytes:
        """Bytes that begin where torch's own tensors do in a page."""
        return self.allocate_at(nbytes, residue_bytes=_TENSOR_RESIDUE_BYTES)

    def allocate_at(self, nbytes: int, *, residue_bytes: int) -> FlatBytes:
        """Bytes in a mapping of their own, so that a file is read straight into them and dropping them frees them."""
        with torch._C._DisableTorchDispatch():
            if nbytes < _MAP_FROM_BYTES:  # a small copy costs less than a mapping
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            return torch.frombuffer(aligned_memory(nbytes, residue_bytes=residue_bytes), dtype=torch.uint8)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether Python or torch says that the host has no memory; torch has no class for it."""
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """The same memory; none of it is page-locked. It outlives an inference block that the caller is in."""
        with torch.inference_mode(False):
            return self.allocate(nbytes)

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Copy at once."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            destination.copy_(source)


_NO_RANGE: Final = contextlib.nullcontext()


def profiler_range(*, goes_out: bool) -> contextlib.AbstractContextManager[Any]:
    """A range in torch's profiler around the queueing of a copy; nothing where no profiler runs."""
    if not torch._C._autograd._profiler_enabled():
        return _NO_RANGE
    return torch.profiler.record_function(f"hyper_parallel: copy {'out' if goes_out else 'back'}")


def backend_for(device: torch.device, config: SwapConfig) -> DeviceBackend | None:
    """The device's backend; None where its tensors are already in host memory and no file was named for them."""
    return find_backend(
        "torch", device.type, config, host_kind="cpu", name=lambda: _name_with_index(device), make=_make_backend
    )


def _name_with_index(device: torch.device) -> str:
    index: int | None = device.index
    if device.type != "cpu" and index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    return str(device)


def _make_backend(name: str) -> DeviceBackend:
    device = torch.device(name)
    return HostBackend() if device.type == "cpu" else AcceleratorBackend(device)


def refuse_capture(where: str) -> None:
    """Raise while a device graph is being captured: a replay of it would reuse buffers that this step lent and took back."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{where}: cannot swap or replay activations while a CUDA graph is captured, because the captured copies would "
            "be repeated with buffers that belong to this step only. Capture a part of the model without an active region, "
            "or leave the wrapper off it."
        )
