"""What lies below MindSpore's public interface, or may move between its releases (2.9 and later). Tiny functions.

MindSpore carries no types: its tensors, parameters, cells, dtypes and handles are ``Any`` in this package.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import mindspore.mint.distributed as dist
from mindspore._c_expression import typing as _typing
from mindspore.common._grad_function import _Function
from mindspore.common.parameter import _Buffer
from mindspore.communication.management import GlobalComm

__all__ = [
    "Buffer",
    "Function",
    "GlobalComm",
    "Number",
    "at_end_of_backward",
    "backward_id",
    "end_failed_gradient",
    "forget_world",
    "has_saved_tensors_hooks",
    "init_with_store",
    "is_leaf",
    "is_recording",
    "no_grad",
    "normalisation_cells",
    "on_buffer_registration",
    "op_seeds",
    "pop_saved_tensors_hooks",
    "prime_streams",
    "push_saved_tensors_hooks",
    "recompute_handles",
    "recompute_hooks",
    "recompute_key",
    "remember_world",
    "restore_op_seeds",
    "tensor_transform",
    "wait_for_ops",
    "world_backend",
    "world_name",
]

Buffer: Final = _Buffer
Function: Final[Any] = _Function
"""The base of autograd Functions in PyNative mode."""

Number: Final[Any] = _typing.Number
"""The class of every dtype that a tensor can have."""

_DEFAULT_WORLD_KEY: Final = "hccl_world_group"
"""The name under which MindSpore's point-to-point calls look for the world, whatever the backend is."""


def prime_streams() -> None:
    """Let streams and events work on the CPU: the first call of each function there only logs an error."""
    import mindspore.runtime.event as event
    import mindspore.runtime.stream as stream

    for seen in (stream.function_stream_status, event.function_event_status):
        seen.update(dict.fromkeys(seen, True))


def init_with_store(*, backend: str, timeout: timedelta, world_size: int, rank: int, store: Any) -> None:
    """Join a world over a TCP store; no scheduler process is needed."""
    from mindspore.communication.management import _init_with_store

    _init_with_store(backend=backend, timeout=timeout, world_size=world_size, rank=rank, store=store)


def remember_world(rank: int, world_size: int) -> None:
    """Tell the point-to-point calls the rank of this process: they ask for a group that exists on Ascend only."""
    caches: Any = dist.distributed
    caches._GROUP_RANK_CACHE[_DEFAULT_WORLD_KEY] = rank
    caches._GROUP_SIZE_CACHE[_DEFAULT_WORLD_KEY] = world_size


def forget_world() -> None:
    """Drop what MindSpore remembers about a world that was left."""
    caches: Any = dist.distributed
    caches._GROUP_RANK_CACHE.clear()
    caches._GROUP_SIZE_CACHE.clear()
    GlobalComm.INITED = False


def world_name() -> str:
    """The name of the group of all ranks."""
    return str(GlobalComm.WORLD_COMM_GROUP)


def world_backend() -> str:
    """The backend of the world; ``dist.get_backend(None)`` answers "hccl" on every device."""
    backend: Any = GlobalComm.BACKEND  # a Backend, which is a str without a useful str()
    return str(getattr(backend, "value", backend)).rpartition(".")[2].lower()


def end_failed_gradient() -> None:
    """Put autograd right after an error left a differentiated function: MindSpore goes on recording, and keeps parts.

    Parameters then refuse to be written, views may be copies, and the next backward of some ops fails.
    """
    executor = _executor()
    executor.set_grad_flag(False)
    executor.clear_res()


def no_grad() -> Any:  # a context manager
    """A context in which autograd records nothing."""
    import mindspore

    return mindspore._no_grad()


def normalisation_cells() -> tuple[type[Any], ...]:
    """The classes of cells that keep moving statistics. Their ops write them unseen."""
    from mindspore.mint.nn.layer import normalization as of_mint
    from mindspore.nn.layer import normalization as of_nn

    return of_nn._BatchNorm, of_nn._InstanceNorm, of_mint._NormBase


def tensor_transform() -> Any:  # mindspore._c_expression.TensorTransform
    """MindSpore's layout transformer, one per process."""
    from mindspore._c_expression import TensorTransform

    return TensorTransform.get_instance()


def _executor() -> Any:  # MindSpore's PyNative executor
    try:
        from mindspore.graph.api import _pynative_executor
    except ImportError:  # before 2.9.0 moved it
        from mindspore.common.api import _pynative_executor
    return _pynative_executor


def backward_id() -> int | None:
    """Tells the backward that runs in this thread from every other; None outside one."""
    key = int(_executor().get_current_autodiff_engine_id())
    return None if key == -1 else key


_MOST_CALLBACKS: Final = 64
_CALLBACKS: Final[deque[Any]] = deque(maxlen=_MOST_CALLBACKS)


def at_end_of_backward(callback: Any) -> None:
    """Call ``callback()`` when the backward that runs now is over; not when it raises.

    The last callbacks are held here. Where an error of MindSpore's own ends a backward, it drops them without Python's lock, and
    to drop the last reference like that ends the process. A backward has one for each device, and one on the first step.
    """
    _CALLBACKS.append(callback)
    _executor().queue_backward_final_callback(callback)


def is_recording() -> bool:
    """Whether autograd records what this thread runs."""
    executor = _executor()
    return bool(executor.grad_flag() and executor.enable_grad())


def is_leaf(tensor: Any) -> bool:
    """Whether a tensor is an input or a parameter of the function that is differentiated now."""
    is_leaf = getattr(
        getattr(tensor, "_grad_node", None), "is_leaf", None
    )  # a release without it saves the tensor itself
    return is_leaf is not None and bool(is_leaf())


def wait_for_ops() -> None:
    """Hold the host until every op that was issued has run; on the CPU they wait in a queue."""
    _executor().sync()


def has_saved_tensors_hooks() -> bool:
    """Whether some pair of hooks would see the next save."""
    return bool(_executor().is_saved_tensor_hook_active())


def push_saved_tensors_hooks(pack: Any, unpack: Any) -> None:
    """Put a pair of hooks on top."""
    _executor().push_saved_tensor_hook(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    """Take the pair on top off."""
    _executor().pop_saved_tensor_hook()


def _seed_counts() -> Any:  # dict: (kernel, seed) -> how often it was asked for
    # The package has a function of the module's name.
    return importlib.import_module("mindspore.common.seed")._KERNEL_SEED


def op_seeds() -> Any:
    """Where the random ops of the CPU stand: MindSpore counts their calls in Python."""
    return dict(_seed_counts())


def restore_op_seeds(seeds: Any) -> None:
    """Put it back; a call that was counted since then was a repetition."""
    counts = _seed_counts()
    counts.clear()
    counts.update(seeds)


def on_buffer_registration(hook: Any) -> Any:  # a handle with remove()
    """Call ``hook(cell, name, tensor)`` wherever a cell registers a buffer; it may return another tensor."""
    from mindspore.nn.cell import register_cell_buffer_registration_hook

    return register_cell_buffer_registration_hook(hook)


def _recompute_module() -> Any:  # the package has a function of the module's name
    return importlib.import_module("mindspore.common.recompute")


@contextlib.contextmanager
def recompute_handles() -> Iterator[list[Any]]:
    """The list that each recomputed region begun in this context adds its handle to; it stays empty where there is none."""
    module = _recompute_module()
    if not hasattr(module, "_recompute_handle_collector_ctx"):
        yield []
        return
    with module._recompute_handle_collector_ctx() as handles:
        yield handles
    outer = module._recompute_handle_collector.get()
    if outer is not None:
        outer.extend(handles)


def recompute_key(handle: Any) -> Any:
    """By what a handle files the replay that runs now."""
    return next(key for key, is_over in reversed(handle.is_recomputed.items()) if not is_over)


def recompute_hooks(handle: Any, key: Any) -> tuple[Any, Any]:
    """The pair of hooks with which MindSpore collects what a replay saves."""
    hooks = _recompute_module()._RecomputationHook(weakref.ref(handle), key)
    return hooks.pack_hook, hooks.unpack_hook
