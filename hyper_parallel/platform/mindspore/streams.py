"""Streams, autograd modes and activation memory on MindSpore.

On the CPU every op runs in order on one stream, and MindSpore's own stream objects are all equal. There
:class:`HostStream` and :class:`HostEvent` stand for them: waiting is over when it begins, and which stream is current
is known per thread. On Ascend MindSpore's own are used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import mindspore

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.base.streams import StreamMembers
from hyper_parallel.platform.base.unsupported import class_property
from hyper_parallel.platform.mindspore import activation_checkpoint, compat
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["HostEvent", "HostStream", "MindSporeStreamMembers", "SymmetricMemoryHandler"]


class HostEvent:
    """A point in the host's own order of execution."""

    def record(self, stream: Any = None) -> None:
        """Everything issued so far has already run."""

    def wait(self, stream: Any = None) -> None:
        """What the event marks has already run."""

    def query(self) -> bool:
        """Whether what the event marks has run; on the host it always has."""
        return True

    def synchronize(self) -> None:
        """Wait for the ops that were issued: MindSpore may still have them in its queue."""
        mindspore.runtime.synchronize()


class HostStream:
    """The host's own order of execution, with the interface of a device stream."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """An event that marks everything issued so far."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """The host is already past every event it can be given."""

    def wait_stream(self, stream: Any) -> None:
        """Host streams share one order; there is nothing to wait for."""

    def query(self) -> bool:
        """Whether everything issued has run, as far as the order of ops can tell."""
        return True

    def synchronize(self) -> None:
        """Wait for the ops that were issued: MindSpore may still have them in its queue."""
        mindspore.runtime.synchronize()


class _CurrentHostStream(threading.local):
    """Which host stream this thread is in; like a device's current stream, per thread."""

    def __init__(self) -> None:
        self.stream = HostStream()


_current = _CurrentHostStream()


@contextlib.contextmanager
def _on_host_stream(stream: HostStream) -> Iterator[HostStream]:
    outer = _current.stream
    _current.stream = stream
    try:
        yield stream
    finally:
        _current.stream = outer


def _stream_context(stream: Any) -> AbstractContextManager[Any]:
    if isinstance(stream, HostStream):
        return _on_host_stream(stream)
    if isinstance(stream, mindspore.runtime.Stream):
        context: AbstractContextManager[Any] = mindspore.runtime.StreamCtx(stream)
        return context
    raise TypeError(f"get_stream_context: expected a stream of new_stream(), got {type(stream).__name__}")


@contextlib.contextmanager
def _profiler_range(name: str) -> Iterator[None]:
    markers = mindspore.profiler.mstx
    opened = markers.range_start(name)
    try:
        yield
    finally:
        markers.range_end(opened)


class SymmetricMemoryHandler:
    """MindSpore offers no symmetric memory; the handler says so."""

    reason: Final = "MindSpore has no symmetric memory"

    def is_available(self) -> bool:
        """Whether the other calls work here."""
        return False

    def empty(self, *size: Any, dtype: Any = None, device: Any = None) -> NoReturn:
        """Refused: there is none."""
        raise self._refusal("empty")

    def rendezvous(self, tensor: Any, group: Any = None) -> NoReturn:
        """Refused: there is none."""
        raise self._refusal("rendezvous")

    def _refusal(self, call: str) -> UnsupportedMemberError:
        return UnsupportedMemberError(
            member=f"get_symmetric_memory_handler().{call}",
            platform="MindSporePlatform",
            reason=self.reason,
            instead="ask is_available() first, and use the collectives (all_gather_into_tensor ...) without it",
        )


def _ending_failures(differentiated: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return differentiated(*args, **kwargs)
        except BaseException:
            compat.end_failed_gradient()  # MindSpore would go on recording
            raise

    return run


class MindSporeStreamMembers(StreamMembers):
    """Streams, autograd, activation memory; beside the base also ``value_and_grad``."""

    @staticmethod
    def value_and_grad(
        function: Callable[..., Any],
        grad_position: int | tuple[int, ...] | None = 0,
        weights: Iterable[Any] | None = None,
    ) -> Callable[..., tuple[Any, Any]]:
        """A function that gives ``function``'s value and its gradient by arguments, by weights, or (by both)."""
        if grad_position is None and weights is None:
            raise ValueError("value_and_grad: nothing to differentiate by; give grad_position, weights, or both")
        held = None if weights is None else list(weights)
        return _ending_failures(mindspore.value_and_grad(function, grad_position, held))

    @staticmethod
    def new_stream() -> Any:
        """A stream of the device, or of the host on the CPU."""
        return HostStream() if on_cpu() else mindspore.runtime.Stream()

    @staticmethod
    def get_current_stream() -> Any:
        """The stream that ops of this thread go to."""
        return _current.stream if on_cpu() else mindspore.runtime.current_stream()

    @staticmethod
    def new_event() -> Any:
        """An event of the device, or of the host on the CPU."""
        return HostEvent() if on_cpu() else mindspore.runtime.Event()

    @staticmethod
    def get_stream_context() -> Callable[[Any], AbstractContextManager[Any]]:
        """A callable; ``with ctx(stream):`` sends this thread's ops to that stream."""
        return _stream_context

    @staticmethod
    def no_grad() -> AbstractContextManager[Any]:
        """A context in which autograd records nothing."""
        context: AbstractContextManager[Any] = compat.no_grad()
        return context

    @staticmethod
    def profiler_record(name: str) -> AbstractContextManager[Any]:
        """A context that shows as an mstx range in MindSpore's profiler on Ascend; the CPU's has no ranges."""
        return _profiler_range(name)

    @class_property
    def checkpoint(self) -> Callable[..., Any]:
        """``mindspore.recompute``, always in its non-reentrant form; on the CPU it keeps what random ops drew."""
        return activation_checkpoint.framework_checkpoint

    @staticmethod
    def ckpt_wrapper(module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any) -> Any:
        """A cell whose every call goes through ``checkpoint_fn``, which is MindSpore's own unless given."""
        function = activation_checkpoint.framework_checkpoint if checkpoint_fn is None else checkpoint_fn
        return activation_checkpoint.CheckpointWrapper(module, function, **checkpoint_fn_kwargs)

    @staticmethod
    def swap_wrapper(module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        """A cell whose saved values go to far memory and come back in time."""
        return activation_checkpoint.swap_wrapper(module, policy_fn)

    @staticmethod
    def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
        """The (forward, recompute) pair of contexts of one region."""
        return activation_checkpoint.create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)

    @staticmethod
    def async_save_on_cpu(policy_fn: Callable[[Any], Any] | None = None) -> AbstractContextManager[Any]:
        """A context in which what autograd saves goes to far memory and comes back in time."""
        context: AbstractContextManager[Any] = activation_checkpoint.AsyncSaveOnCpu(policy_fn)
        return context

    @staticmethod
    def get_symmetric_memory_handler() -> SymmetricMemoryHandler:
        """A handler that says that there is none."""
        return SymmetricMemoryHandler()
