"""``print_saved`` on torch: a hook on every value that autograd saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.saved_values import SavedValues
from hyper_parallel.backends.torch.planner.blocks import TREE, device_of, require_module
from hyper_parallel.backends.torch.planner.survey import require_step
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.backends.torch.storages import NO_STORAGE_ERRORS, alias, is_parameter_derived
from hyper_parallel.planner.saved import SavedTable

__all__ = ["list_saved"]


def list_saved(model: Any, step: Callable[[], Any]) -> SavedTable:
    """See ``hyper_parallel.print_saved``; nothing is printed."""
    who = "print_saved"
    require_module(model, who)
    require_step(step, who)
    paths = ModulePaths()
    seen = SavedValues(paths, torch)
    with restored_after(model, device_of(model, who), who=who):
        paths.watch_module(TREE, "", model)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_Pack(model, seen), _unchanged):
                step()
        finally:
            paths.remove()
    return seen.table(who, outside="torch.no_grad()")


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Pack:
    """The pack hook. A weak reference to a storage stays its own also when the bytes are freed and used again."""

    def __init__(self, model: nn.Module, seen: SavedValues) -> None:
        self._seen = seen
        self._weights: set[StorageWeakRef] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            reference, _ = _storage_of(tensor)
            if reference is not None:
                self._weights.add(reference)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count one value. What is returned is an alias: autograd's own output handed back to it would never be freed."""
        reference, nbytes = _storage_of(tensor)
        if reference is None:
            self._seen.add_unknown()
        elif reference in self._weights or is_parameter_derived(tensor):
            self._seen.add_weight(reference, nbytes)
        else:
            self._seen.add(reference, nbytes, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        return alias(tensor)


def _storage_of(tensor: torch.Tensor) -> tuple[StorageWeakRef | None, int]:
    try:
        storage = tensor.untyped_storage()
        return StorageWeakRef(storage), storage.nbytes()
    except NO_STORAGE_ERRORS:
        return None, 0
