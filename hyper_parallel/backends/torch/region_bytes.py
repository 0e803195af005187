"""Counts, in the first step only, what a region that runs Python again hands to autograd and does not keep.

The region's own hooks see every value that autograd saves. A counting hook is put in front of them while the region's
function runs in forward, and passes every value on. (A tape counts itself: regions that lie in one another know tapes by
their hooks, so nothing may be put in front of those.) Parameters, the region's inputs and its outputs are not counted: they
are held with and without the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.storages import NO_STORAGE_ERRORS, is_parameter_derived, tensors_in
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["counted"]

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first run is counted; the function itself once the first step is over."""
    if SwapManager().first_step.is_over or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function
    return _Counted(function)


class _Counted:
    """A region's function; its replays run it as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__self__ = getattr(function, "__self__", function)  # errors name a region by the owner of its function
        self._function = function
        self._is_done = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = None if self._is_done or is_in_backward() else _top_hooks(True)
        self._is_done = True
        if hooks is None:
            return self._function(*args, **kwargs)
        pack, unpack = hooks
        seen: dict[StorageWeakRef, int] = {}

        def count(tensor: torch.Tensor) -> Any:
            if not (tensor.is_leaf and tensor.requires_grad) and not is_parameter_derived(tensor):
                _count_storage(tensor, seen)
            return pack(tensor)

        _push_hooks(count, unpack)
        try:
            output = self._function(*args, **kwargs)
        finally:
            _pop_hooks()
        for tensor in tensors_in((args, kwargs, output)):
            _forget(tensor, seen)
        SwapManager().first_step.memory.add_region(sum(seen.values()))
        return output


def _count_storage(tensor: torch.Tensor, seen: dict[StorageWeakRef, int]) -> None:
    """Add the storage of a tensor. A weak reference stays its own also when the bytes are freed and used again."""
    with contextlib.suppress(*NO_STORAGE_ERRORS):
        storage = tensor.untyped_storage()
        seen[StorageWeakRef(storage)] = storage.nbytes()


def _forget(tensor: torch.Tensor, seen: dict[StorageWeakRef, int]) -> None:
    with contextlib.suppress(*NO_STORAGE_ERRORS):
        seen.pop(StorageWeakRef(tensor.untyped_storage()), None)
