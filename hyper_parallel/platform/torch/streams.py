"""Streams, autograd modes and activation memory on torch.

Where there is no accelerator every op runs at once, in order, on the calling thread. :class:`HostStream` and
:class:`HostEvent` say exactly that: waiting is over when it begins, and an event has happened once it was recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from hyper_parallel.platform.base.streams import StreamMembers
from hyper_parallel.platform.base.unsupported import class_property
from hyper_parallel.platform.torch.device import accelerator_type
from hyper_parallel.platform.torch.symmetric_memory import SymmetricMemoryHandler
from hyper_parallel.platform.torch.value_and_grad import value_and_grad

__all__ = ["HostEvent", "HostStream", "TorchStreamMembers"]


class HostEvent:
    """A point in the host's own order of execution."""

    device_type = "cpu"

    def record(self, stream: Any = None) -> None:
        """Everything issued so far has already run."""

    def wait(self, stream: Any = None) -> None:
        """What the event marks has already run."""

    def query(self) -> bool:
        """Whether what the event marks has run; on the host it always has."""
        return True

    def synchronize(self) -> None:
        """What the event marks has already run."""


class HostStream:
    """The host's own order of execution, with the interface of a device stream."""

    device_type = "cpu"

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
        """Whether everything issued has run; on the host it always has."""
        return True

    def synchronize(self) -> None:
        """Everything issued has already run."""


class _CurrentHostStream(threading.local):
    """Which host stream this thread is in; like a device's current stream, per thread."""

    def __init__(self) -> None:
        self.stream = HostStream()


_current = _CurrentHostStream()


class _HostStreamContext:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._outer: list[HostStream] = []

    def __enter__(self) -> HostStream:
        self._outer.append(_current.stream)
        _current.stream = self._stream
        return self._stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.stream = self._outer.pop()


class TorchStreamMembers(StreamMembers):
    """Streams, autograd, activation memory; beside the base also ``value_and_grad``."""

    @staticmethod
    def value_and_grad(
        function: Callable[..., Any],
        grad_position: int | tuple[int, ...] | None = 0,
        weights: Iterable[torch.Tensor] | None = None,
    ) -> Callable[..., tuple[Any, Any]]:
        """A function that gives ``function``'s value and its gradient by arguments, by weights, or (by both)."""
        return value_and_grad(function, grad_position, weights)

    @staticmethod
    def new_stream() -> Any:
        """A stream of the accelerator, or of the host where there is none."""
        return HostStream() if accelerator_type() is None else torch.Stream()

    @staticmethod
    def get_current_stream() -> Any:
        """The stream that ops of this thread go to."""
        return _current.stream if accelerator_type() is None else torch.accelerator.current_stream()

    @staticmethod
    def new_event() -> Any:
        """An event of the accelerator, or of the host where there is none."""
        return HostEvent() if accelerator_type() is None else torch.Event()

    @staticmethod
    def get_stream_context() -> Callable[[Any], AbstractContextManager[Any]]:
        """A callable; ``with ctx(stream):`` sends this thread's ops to that stream."""
        return _stream_context

    @staticmethod
    def no_grad() -> AbstractContextManager[Any]:
        """A context in which autograd records nothing."""
        return torch.no_grad()

    @staticmethod
    def profiler_record(name: str) -> AbstractContextManager[Any]:
        """A context that shows as a range of that name in ``torch.profiler``."""
        return torch.profiler.record_function(name)

    @class_property
    def checkpoint(self) -> Callable[..., Any]:
        """``torch.utils.checkpoint.checkpoint``, always in its non-reentrant form."""
        from hyper_parallel.backends.torch import framework_checkpoint

        return framework_checkpoint

    @staticmethod
    def ckpt_wrapper(module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any) -> Any:
        """``module`` wrapped so that its forward runs under ``checkpoint_fn``."""
        from hyper_parallel.backends.torch import CheckpointWrapper, framework_checkpoint

        return CheckpointWrapper(module, checkpoint_fn=checkpoint_fn or framework_checkpoint, **checkpoint_fn_kwargs)

    @staticmethod
    def swap_wrapper(module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        """``module`` wrapped so that what its forward saves goes to far memory."""
        from hyper_parallel.backends.torch import swap_wrapper

        return swap_wrapper(module, policy_fn)

    @staticmethod
    def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
        """The pair of contexts, for forward and for recompute, that obey a per-op policy."""
        from hyper_parallel.backends.torch import create_selective_checkpoint_contexts

        return create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)

    @staticmethod
    def async_save_on_cpu(policy_fn: Callable[[Any], Any] | None = None) -> AbstractContextManager[Any]:
        """The saved-tensors context under which activations are swapped."""
        from hyper_parallel.backends.torch import AsyncSaveOnCpu

        return AsyncSaveOnCpu(policy_fn)

    @staticmethod
    def get_symmetric_memory_handler() -> SymmetricMemoryHandler:
        """torch's symmetric memory, or a handler that says why there is none."""
        return SymmetricMemoryHandler()


def _stream_context(stream: Any) -> AbstractContextManager[Any]:
    if isinstance(stream, HostStream):
        return _HostStreamContext(stream)
    if isinstance(stream, torch.Stream):
        return stream  # a torch.Stream is its own context
    raise TypeError(f"get_stream_context: expected a stream of new_stream(), got {type(stream).__name__}")
