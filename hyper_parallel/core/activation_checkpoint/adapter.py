"""What the engine needs from a framework and its device, and nothing more.

A :class:`DeviceBackend` is one device of one framework: real streams on an accelerator, simulated ones in
``hyper_parallel.testing``, trivial ones where the "device" is host memory. The engine only ever sees flat byte buffers,
streams and events through it, so that one engine serves both frameworks.

Theory of operation
-------------------
*Order, not waiting.* Every method but :meth:`DeviceBackend.synchronize_event` returns at once. What must not happen
before something else is said by ``wait_event``: work queued on the stream after the call runs after the event.

*Memory belongs to a stream.* ``allocate`` takes from the pool of the calling thread's current stream. A block that is
dropped may be handed out again at once to work queued later on that same stream, so a buffer that another stream reads
or writes must be ordered (``wait_event`` on its own stream) before it is dropped.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.engine import Engine

__all__ = [
    "Completion",
    "DeviceBackend",
    "Event",
    "FlatBytes",
    "Stream",
    "StreamCompletion",
    "Tensor",
    "TensorAdapter",
    "View",
    "tensor_adapter",
    "current_backend",
]

Tensor: TypeAlias = Any  # torch.Tensor | mindspore.Tensor
FlatBytes: TypeAlias = Any  # a one-dimensional uint8 tensor over a whole storage: torch.Tensor | mindspore.Tensor
Stream: TypeAlias = Any  # torch.Stream | mindspore.runtime.Stream | a simulated stream
Event: TypeAlias = Any  # torch.Event | mindspore.runtime.Event | a simulated event


class DeviceBackend(Protocol):
    """One device, as the engine sees it."""

    name: str
    """Names the device in reports and errors: ``cuda:0``, ``npu:1``, ``torch simulated``, ``cpu``."""
    is_host_memory: bool
    """Whether the device's bytes are plain host memory that a file can be written from in place."""

    def unseen(self) -> AbstractContextManager[None]:
        """A context in which tensor ops are seen by no dispatch mode and recorded by no graph."""

    def current_stream(self) -> Stream:
        """The calling thread's current stream on this device: where its kernels go, and whose pool it allocates from."""

    def new_stream(self) -> Stream:
        """A stream that runs beside all others."""

    def record_event(self, stream: Stream, *, timing: bool = False) -> Event:
        """An event that is done when everything queued on ``stream`` so far is."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Work queued on ``stream`` from now on runs after ``event``."""

    def event_is_done(self, event: Event) -> bool:
        """Whether the host can already see that ``event`` happened."""

    def synchronize_event(self, event: Event) -> None:
        """Hold the calling thread until ``event`` happened."""

    def elapsed_us(self, start: Event, end: Event) -> float:
        """Device time between two timing events that are both done; negative when ``end`` came first."""

    def allocate(self, nbytes: int) -> FlatBytes:
        """Uninitialised device bytes from the current stream's pool."""

    def dropped(self, nbytes: int) -> None:
        """Our reference to so many device bytes just went: a chance to give them back to where they came from."""

    def held_bytes(self) -> int | None:
        """What tensors of this process hold on the device now; None where the framework cannot say."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` is this device saying that it is full."""

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """Uninitialised host bytes of exactly this size, page-locked where ``pinned`` and the device has such memory.

        Raises ``MemoryError`` when the host refuses.
        """

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Queue a copy of all bytes on ``stream``; between device and host, in either direction."""

    def host_view(self, flat: FlatBytes) -> memoryview:
        """The bytes of a host buffer, writable and without a copy."""


class Completion(Protocol):
    """The moment after which a copy's source may be dropped and its destination may be read."""

    def is_done(self) -> bool:
        """Whether the copy is known to have ended; never blocks."""

    def order(self, stream: Stream) -> None:
        """Make work queued on ``stream`` from now on run after the copy. Raises what the copy failed with, if it did."""

    def wait(self) -> None:
        """Hold the calling thread until the copy ended. Raises what it failed with, if it did."""


class StreamCompletion:
    """The end of a copy that a stream carries: an event and the device it belongs to, in one record.

    ``start`` is None for a copy that nobody times.
    """

    __slots__ = ("_backend", "end", "start")

    def __init__(self, backend: DeviceBackend, start: Event | None, end: Event) -> None:
        self._backend = backend
        self.start = start
        self.end = end

    def is_done(self) -> bool:
        """See :class:`Completion`."""
        return self._backend.event_is_done(self.end)

    def order(self, stream: Stream) -> None:
        """See :class:`Completion`."""
        self._backend.wait_event(stream, self.end)

    def wait(self) -> None:
        """See :class:`Completion`."""
        self._backend.synchronize_event(self.end)


class View(Protocol):
    """How to make an exact view again."""

    def over(self, device_bytes: FlatBytes) -> Tensor:
        """The same size, strides, offset and dtype, over these bytes."""


class TensorAdapter(Protocol):
    """What the explicit interface needs to know of a framework's tensors."""

    def is_plain_tensor(self, value: Any) -> bool:
        """Whether ``value`` is a tensor with a storage of its own."""

    def plain_tensors(self, tree: Any) -> Iterable[Tensor]:
        """Every such tensor in a tree of values."""

    def engine_of(self, tensor: Tensor) -> Engine | None:
        """The schedule of its device; None when it is in host memory already."""

    def storage_key(self, tensor: Tensor) -> int:
        """Names its storage among the living ones."""

    def storage_bytes(self, tensor: Tensor) -> int:
        """The size of its storage."""

    def version_of(self, tensor: Tensor) -> int:
        """Grows with every change in place."""

    def is_slice(self, tensor: Tensor) -> bool:
        """Whether it covers a part of its storage only."""

    def view_of(self, tensor: Tensor) -> View:
        """How to make it again."""

    def flat_bytes(self, tensor: Tensor) -> FlatBytes:
        """All bytes of its storage."""

    def watch_layers(self, layers: Iterable[Any]) -> list[Any]:
        """Call ``SwapManager.enter_layer`` and ``leave_layer`` around the layers' forwards; removable handles."""

    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a backward reaches the first tensor in ``outputs``, which stay as they are.

        It may be called again, for another tensor of theirs or for another backward.
        """


def current_backend() -> Any:  # the module hyper_parallel.backends.<framework>
    """The backend package of the platform in use."""
    from hyper_parallel.platform.platform import PlatformType, get_platform

    framework = "torch" if get_platform().platform_type is PlatformType.PYTORCH else "mindspore"
    name = f"hyper_parallel.backends.{framework}"
    # torch.compile traces this look-up, continues in the backend's function, and is told there to stop.
    if name in sys.modules:
        return sys.modules[name]
    return importlib.import_module(name)


def tensor_adapter() -> TensorAdapter:
    """The tensor adapter of the platform in use."""
    return cast(TensorAdapter, current_backend().tensor_adapter)
