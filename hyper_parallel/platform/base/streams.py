"""The Platform members about streams, autograd modes and activation memory.

The gradient handle, in one paragraph: a trainer launches an asynchronous reduction of gradients and gives its handle
here. One handle is in flight. When the next arrives, the previous one is first finished on the gradient stream: waited
for there, and its post-processing run there, so that the compute stream is not held up. ``wait_grad_handle`` finishes
the last one and orders the current stream after the gradient stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from hyper_parallel.platform.base.unsupported import class_property, needs_framework

__all__ = ["StreamMembers"]


def _two_null_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), nullcontext()


class StreamMembers:
    """Streams, autograd, activation memory. ``Any`` stands for a framework's stream, event, handle or module."""

    current_grad_handle: ClassVar[Any] = None
    post_grad_handle_process: ClassVar[Callable[[], Any] | None] = None
    grad_sync_stream: ClassVar[Any] = None

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

    @classmethod
    def set_grad_reduce_handle(cls, handle: Any, post_process: Callable[[], Any] | None = None) -> None:
        """Put ``handle`` in flight, after finishing the previous one on the gradient stream."""
        cls._process_current_handle()
        cls.current_grad_handle = handle
        # A bare function on a class would become a method; staticmethod keeps it the function it was given as.
        cls.post_grad_handle_process = None if post_process is None else staticmethod(post_process)

    @classmethod
    def wait_grad_handle(cls) -> None:
        """Finish the handle in flight and order the current stream after the gradient stream."""
        cls._process_current_handle()
        if cls.grad_sync_stream is not None:
            cls.get_current_stream().wait_stream(cls.grad_sync_stream)

    @classmethod
    def _process_current_handle(cls) -> None:
        """Wait for the handle in flight and run its post-processing, both on the gradient stream."""
        handle, post_process = cls.current_grad_handle, cls.post_grad_handle_process
        if handle is None:
            return
        # Cleared first: after a failed reduction the next step must not wait for the same handle again.
        cls.current_grad_handle = None
        cls.post_grad_handle_process = None
        if cls.grad_sync_stream is None:
            cls.grad_sync_stream = cls.new_stream()
        with cls.get_stream_context()(cls.grad_sync_stream):
            handle.wait()
            if post_process is not None:
                post_process()

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
