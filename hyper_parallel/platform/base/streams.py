"""The Platform members about streams, autograd modes and activation memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.platform.base.unsupported import class_property, needs_framework

__all__ = ["StreamMembers"]


def _two_null_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


class StreamMembers:
    """Streams, autograd, activation memory. ``Any`` stands for a framework's stream, event, handle or module."""

    @staticmethod
    def new_stream() -> Any:
        """A new stream of the current device."""
        raise needs_framework("new_stream")

    @staticmethod
    def get_current_stream() -> Any:
        """The stream that ops of this thread go to."""
        raise needs_framework("get_current_stream")

    @staticmethod
    def new_event() -> Any:
        """A new event of the current device."""
        raise needs_framework("new_event")

    @staticmethod
    def get_stream_context() -> Callable[[Any], AbstractContextManager[Any]]:
        """A callable; ``with ctx(stream):`` sends this thread's ops to that stream."""
        raise needs_framework("get_stream_context")

    @staticmethod
    def no_grad() -> AbstractContextManager[Any]:
        """A context in which autograd records nothing."""
        raise needs_framework("no_grad")

    @staticmethod
    def profiler_record(name: str) -> AbstractContextManager[Any]:
        """A context that shows as a range of that name in the framework's profiler."""
        raise needs_framework("profiler_record")

    @class_property
    def checkpoint(self) -> Callable[..., Any]:
        """The framework's non-reentrant checkpoint function."""
        raise needs_framework("checkpoint")

    @class_property
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
        """A factory of two contexts, for forward and for recompute, that do nothing."""
        return _two_null_contexts

    @staticmethod
    def ckpt_wrapper(module: Any, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any) -> Any:
        """``module`` wrapped so that its forward runs under ``checkpoint_fn``."""
        raise needs_framework("ckpt_wrapper")

    @staticmethod
    def swap_wrapper(module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        """``module`` wrapped so that what its forward saves goes to far memory."""
        raise needs_framework("swap_wrapper")

    @staticmethod
    def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
        """The pair of contexts, for forward and for recompute, that obey a per-op policy."""
        raise needs_framework("create_selective_checkpoint_contexts")

    @staticmethod
    def async_save_on_cpu(policy_fn: Callable[[Any], Any] | None = None) -> AbstractContextManager[Any]:
        """The saved-tensors context under which activations are swapped."""
        raise needs_framework("async_save_on_cpu")

    @staticmethod
    def get_symmetric_memory_handler() -> Any:
        """The framework's symmetric memory, or a handler that says why there is none."""
        raise needs_framework("get_symmetric_memory_handler")
