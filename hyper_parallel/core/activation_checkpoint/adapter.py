"""What the engine needs from a framework and its device, and nothing more.

A :class:`DeviceBackend` is one device of one framework: real streams on an accelerator, simulated ones in
``hyper_parallel.simulation``, trivial ones where the "device" is host memory. The engine sees flat byte buffers, streams and
events only through it. A :class:`TensorAdapter` is one framework: its tensors and its autograd. Packer, regions, marks and
the explicit interface are written over it once, for both frameworks.

Theory of operation
-------------------
*Order, not waiting.* Every method but :meth:`DeviceBackend.synchronize_event` returns at once. What must not happen
before something else is said by ``wait_event``: work queued on the stream after the call runs after the event.

*Memory belongs to a stream.* ``allocate`` takes from the pool of the calling thread's current stream. A block that is
dropped may be handed out again at once to work queued later on that same stream, so a buffer that another stream reads
or writes must be ordered (``wait_event`` on its own stream) before it is dropped.
"""

from __future__ import annotations

import abc
import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import hyper_parallel.platform.platform as platforms
from hyper_parallel.core.activation_checkpoint.source import Source
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.trees import tree_map

if TYPE_CHECKING:
    from hyper_parallel.config import SwapConfig
    from hyper_parallel.core.activation_checkpoint.engine import BackwardTask
    from hyper_parallel.core.activation_checkpoint.packed import Scope
    from hyper_parallel.core.activation_checkpoint.record import Position

__all__ = [
    "Completion",
    "DeviceBackend",
    "Event",
    "FlatBytes",
    "Stream",
    "StreamCompletion",
    "Tensor",
    "TensorAdapter",
    "VersionToken",
    "View",
    "current_backend",
    "instances_in",
    "tensor_adapter",
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
        """Called after the engine dropped a reference to so many device bytes; a backend may return memory to the system."""

    def held_bytes(self) -> int | None:
        """What tensors of this process hold on the device now; None where the framework cannot say."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` means that this device is out of memory."""

    def allocate_host(self, nbytes: int, *, pinned: bool) -> FlatBytes:
        """Uninitialised host bytes of exactly this size, page-locked where ``pinned`` and the device has such memory.

        Raises ``MemoryError`` when the host refuses.
        """

    def allocate_all(self, sizes: Sequence[int]) -> list[FlatBytes]:
        """Several buffers of :meth:`allocate`. The first ones where the device has no memory for all; raises where for none."""

    def copy_all(self, copies: Sequence[tuple[FlatBytes, FlatBytes]], stream: Stream) -> None:
        """Queue several copies of :meth:`copy` on one stream, (destination, source) each."""

    def copy(self, destination: FlatBytes, source: FlatBytes, stream: Stream) -> None:
        """Queue a copy of all bytes on ``stream``; between device and host, in either direction."""

    def host_view(self, flat: FlatBytes) -> memoryview:
        """The bytes of a host buffer, writable and without a copy."""


class Completion(Protocol):
    """The moment after which a copy's source may be dropped and its destination may be read."""

    def is_done(self) -> bool:
        """Whether the copy is known to have ended; never blocks."""

    def is_ordered_before(self, stream: Stream) -> bool:
        """Whether :meth:`order` is known to have ordered ``stream``; False where that is not remembered."""

    def order(self, stream: Stream) -> None:
        """Make work queued on ``stream`` from now on run after the copy. Raises what the copy failed with, if it did."""

    def wait(self) -> None:
        """Hold the calling thread until the copy ended. Raises what it failed with, if it did."""


class StreamCompletion:
    """The end of copies that a stream carries: an event and the device it belongs to, in one record.

    Several records share it where their copies were launched together. So it remembers which streams were ordered after it,
    and that it is done: the device is told once, and asked no more once it has said yes.

    ``start`` is None for copies that are not timed.
    """

    __slots__ = ("_backend", "_is_done", "_ordered", "end", "start")

    def __init__(self, backend: DeviceBackend, start: Event | None, end: Event) -> None:
        self._backend = backend
        self._is_done = False
        self._ordered: tuple[Stream, ...] = ()
        self.start = start
        self.end = end

    def is_done(self) -> bool:
        """See :class:`Completion`."""
        if not self._is_done:
            self._is_done = self._backend.event_is_done(self.end)
        return self._is_done

    def is_ordered_before(self, stream: Stream) -> bool:
        """See :class:`Completion`."""
        return stream in self._ordered

    def order(self, stream: Stream) -> None:
        """See :class:`Completion`."""
        if stream not in self._ordered:
            self._backend.wait_event(stream, self.end)
            self._ordered = (*self._ordered, stream)

    def wait(self) -> None:
        """See :class:`Completion`."""
        self._backend.synchronize_event(self.end)


class View(Protocol):
    """How to make an exact view again."""

    size: Any
    dtype: Any

    def over(self, device_bytes: FlatBytes) -> Tensor:
        """The same size, strides, offset and dtype, over these bytes."""


class VersionToken(Protocol):
    """Shows the version of one tensor. A tensor that shares the version counter is such a token itself."""

    @property
    def _version(self) -> int:
        """The number of changes in place that the framework has counted so far."""


class TensorAdapter(abc.ABC):
    """The tensors and the autograd of one framework, as the packer, the regions and the explicit interface need them.

    Requirements. A framework can be supported if

    1. a tensor has ``shape``, ``dtype`` and ``_version``; the version grows with changes in place, as far as the framework
       counts them;
    2. the storage under a tensor can be named while it lives, has a size, and can be read as one flat buffer;
    3. an exact view can be made again over other bytes with the same content;
    4. a second tensor over the same bytes can be made that has no history in autograd;
    5. a token can be made that shows the version of a tensor and does not hold its bytes;
    6. autograd calls a pair of hooks for every value that it saves, and says whether a backward runs;
    7. ops can be seen, one by one, while a region runs (for policies per op; the dispatch modes are in ``backends``).

    Methods with a body have the answer of a framework without the exception that their docstring names.
    """

    # ------------------------------------------------------------------ one tensor

    @abc.abstractmethod
    def is_tensor(self, value: Any) -> bool:
        """Whether ``value`` is a tensor of this framework, of any class."""

    @abc.abstractmethod
    def is_plain_tensor(self, value: Any) -> bool:
        """Whether ``value`` is a tensor with a storage of its own."""

    def can_be_marked(self, value: Any) -> bool:
        """Whether ``value`` is a plain tensor that is not a parameter."""
        return self.is_plain_tensor(value) and self.why_never_swapped(value) is None

    @abc.abstractmethod
    def why_never_swapped(self, tensor: Tensor) -> str | None:
        """The :class:`KeepReason` of a tensor that always stays because of its class; None for a plain tensor."""

    @abc.abstractmethod
    def is_empty(self, tensor: Tensor) -> bool:
        """Whether it has no elements."""

    @abc.abstractmethod
    def device_key(self, tensor: Tensor) -> Hashable:
        """Names its device for :meth:`backend_for`."""

    @abc.abstractmethod
    def backend_for(self, device_key: Any, config: SwapConfig) -> DeviceBackend | None:
        """The backend of a device; None where its tensors are in host memory already."""

    @abc.abstractmethod
    def tensors_in(self, values: Iterable[Any]) -> list[Tensor]:
        """The tensors among an op's arguments, also those in lists."""

    @abc.abstractmethod
    def shapes_of(self, args: Any) -> list[Any]:
        """The shape and dtype of each tensor argument: what a replayed op must be given again for a kept output to fit."""

    @abc.abstractmethod
    def bytes_of(self, output: Any) -> int:
        """The bytes of the tensors in an op's output."""

    # ------------------------------------------------------------------ its storage

    @abc.abstractmethod
    def storage_key(self, tensor: Tensor) -> int:
        """Names its storage among the living ones."""

    def storage_key_if_any(self, tensor: Tensor) -> int | None:
        """The same; None for a tensor of a class without a storage."""
        return self.storage_key(tensor)

    @abc.abstractmethod
    def storage_bytes(self, tensor: Tensor) -> int:
        """The size of its storage."""

    @abc.abstractmethod
    def is_slice(self, tensor: Tensor) -> bool:
        """Whether it covers a part of its storage only."""

    @abc.abstractmethod
    def storage_watch(self, tensor: Tensor, holder: object) -> Callable[[], bool]:
        """Answers whether its storage is still alive. ``holder`` holds the storage; the watch does not hold ``holder``.

        Where the framework does not tell when a storage dies, the answer is whether ``holder`` is alive.
        """

    @abc.abstractmethod
    def flat_bytes(self, tensor: Tensor) -> FlatBytes:
        """All bytes of its storage."""

    @abc.abstractmethod
    def view_of(self, tensor: Tensor) -> View:
        """How to make it again."""

    def is_parameter_derived(self, tensor: Tensor) -> bool:
        """Whether it is a view or a cast of a parameter. False where the framework does not show it on the tensor."""
        return False

    def is_copied_by_bytes(self, tensor: Tensor) -> bool:
        """Whether the bytes of its storage, with a size, strides and an offset, are all there is to it."""
        return True

    def is_changed_piece(self, tensor: Tensor, storage_bytes: int) -> bool:
        """Whether a part of a storage was changed on a version counter of its own; False where a storage has one counter."""
        return False

    def why_kept(self, tensor: Tensor, storage_bytes: int, is_output: bool) -> str | None:
        """The :class:`KeepReason` of a tensor that stays whatever the policy and the settings say; None where it may move.

        ``is_output``: an op's output that a policy moves. Otherwise autograd saves the tensor.
        """
        if storage_bytes == 0 or self.is_empty(tensor):
            return KeepReason.EMPTY
        if not is_output and self.is_parameter_derived(tensor):
            return KeepReason.PARAMETER
        if not self.is_copied_by_bytes(tensor) or self.is_changed_piece(tensor, storage_bytes):
            return KeepReason.EXOTIC
        return KeepReason.IN_BACKWARD if not is_output and self.is_in_backward() else None

    # ------------------------------------------------------------------ its version and its aliases

    @abc.abstractmethod
    def version_token(self, tensor: Tensor, *, is_below_autograd: bool = False) -> Any:  # VersionToken
        """A token that shows every later change of the tensor and holds no bytes."""

    def share_key(self, tensor: Tensor) -> Hashable:
        """Names the storage together with the version counter that the tensor uses."""
        return self.storage_key(tensor)

    def source_of(self, tensor: Tensor, is_below_autograd: bool) -> Source:
        """What is kept of it while its bytes are away; ``is_below_autograd``: the caller runs below autograd's kernels."""
        return Source(
            self.view_of(tensor),
            self.version_token(tensor, is_below_autograd=is_below_autograd),
            storage_key=self.storage_key(tensor),
            share_key=self.share_key(tensor),
            is_alive=self.storage_watch(tensor, tensor),
        )

    @abc.abstractmethod
    def alias(self, tensor: Tensor, *, is_below_autograd: bool = False) -> Tensor:
        """A second tensor over the same bytes, never the tensor itself; with the same version where it is shared."""

    @abc.abstractmethod
    def held_alias(self, tensor: Tensor) -> tuple[Tensor, Any]:  # VersionToken
        """An alias to keep, and the token that shows the version of ``tensor``."""

    @abc.abstractmethod
    def held_output(self, tensor: Tensor) -> tuple[Tensor, Any]:  # VersionToken
        """The same for an op's output inside a dispatch mode; it may be the output itself (:meth:`held_after_forward`)."""

    def held_after_forward(self, held: Tensor, token: Any) -> tuple[Tensor, Any]:  # VersionToken
        """What takes the place of :meth:`held_output` when the region's forward is over."""
        return held, token

    @abc.abstractmethod
    def clone(self, tensor: Tensor) -> Tensor:
        """The same tensor over bytes of its own, made where no graph and no dispatch mode sees it."""

    def view_for_backward(
        self, source: Source, device_bytes: FlatBytes, scope: Scope, *, counts_changes: bool
    ) -> Tensor:
        """The view that backward gets. A framework may have to hold what it hands out, and check it.

        A backward that is recorded itself saves this view. Where its bytes are still those of the source, the view must count
        the changes of the source, unless they are no fault (not ``counts_changes``).
        """
        return source.over(device_bytes)

    # ------------------------------------------------------------------ autograd

    @abc.abstractmethod
    def current_task(self, position: Position) -> BackwardTask | None:
        """The backward that runs on this thread and wants a value of this position; None outside one."""

    @abc.abstractmethod
    def is_in_backward(self) -> bool:
        """Whether this thread runs inside a backward."""

    @abc.abstractmethod
    def is_recording(self) -> bool:
        """Whether autograd records what this thread runs."""

    @abc.abstractmethod
    def next_sequence(self) -> int:
        """A number higher than that of everything saved so far."""

    def sequence_of_save(self) -> int:
        """The number of the node whose value a pack hook is given."""
        return self.next_sequence()

    def wanted_by(self) -> str:
        """What error messages say about the node that wants a value; empty where the framework does not show it."""
        return ""

    def refuse_capture(self, where: str) -> None:
        """Raise where device work is being captured for a later replay by the device."""
        return

    @abc.abstractmethod
    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """Call ``callback`` when a backward reaches the first tensor in ``outputs``, which stay as they are.

        It may be called again, for another tensor of theirs or for another backward.
        """

    @abc.abstractmethod
    def hook_places(self, outputs: Any) -> list[Callable[[Callable[[Any], None]], Any]]:
        """Functions that register a hook in the graph of ``outputs``; empty where they have no graph."""

    # ------------------------------------------------------------------ modules and ranks

    @abc.abstractmethod
    def module_label(self, value: Any) -> str | None:
        """The class name of a module, seen through a wrapper of ours; None for any other callable."""

    def device_peak_bytes(self) -> int | None:
        """The most bytes that the current device has held in this process; None where it does not count them."""
        return None

    def allocator_retries(self) -> int:
        """How often the current device's allocator found no memory and asked again; 0 where it does not count that."""
        return 0

    def check_op_names(self, names: list[str], where: str) -> None:  # noqa: B027
        """Refuse names that no op has (PolicyError, with near misses). Accepts all where a framework cannot list its ops."""

    @abc.abstractmethod
    def forward_pre_hooks(self, layer: Any) -> Iterable[Any]:
        """The hooks that run before a module's forward."""

    def local_processes(self) -> int:
        """How many ranks of the default group are on this host, as far as is known; 1 where there is no group.

        Never waits for another rank. One that has not said where it is counts as one of this host.
        """
        return 1

    @abc.abstractmethod
    def rank(self) -> int:
        """The rank of this process in the default group; 0 without one."""

    def plain_tensors(self, tree: Any) -> list[Tensor]:
        """Every plain tensor in a tree of values."""
        found: list[Tensor] = []
        tree_map(lambda leaf: found.append(leaf) if self.is_plain_tensor(leaf) else None, tree)
        return found


def instances_in(kind: type, values: Iterable[Any]) -> list[Any]:
    """The instances of a class among the arguments of an op, also those in lists, tuples and dicts."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, kind):
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend(instances_in(kind, value))
        elif isinstance(value, dict):  # an argument of torch's higher-order ops
            found.extend(instances_in(kind, value.values()))
    return found


def current_backend() -> Any:  # the module hyper_parallel.backends.<framework>
    """The backend package of the platform in use."""
    is_torch = platforms.get_platform().platform_type is platforms.PlatformType.PYTORCH
    framework = "torch" if is_torch else "mindspore"
    name = f"hyper_parallel.backends.{framework}"
    # torch.compile traces this look-up, continues in the backend's function, and is told there to stop.
    if name in sys.modules:
        return sys.modules[name]
    return importlib.import_module(name)


def tensor_adapter() -> TensorAdapter:
    """The tensor adapter of the platform in use."""
    return cast(TensorAdapter, current_backend().tensor_adapter)
