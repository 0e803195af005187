"""``print_saved`` on torch: a hook on every value that autograd saves, and what ran when it was saved."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hyper_parallel
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.torch.planner.blocks import TREE, device_of, require_module
from hyper_parallel.backends.torch.planner.survey import require_step
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.backends.torch.storages import NO_STORAGE_ERRORS, alias, is_parameter_derived
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.saved import SavedRow, SavedTable

__all__ = ["list_saved"]

_NOT_THE_USERS: Final = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, hyper_parallel)
)

_MADE_BY_PYTHON: Final = ("<frozen ", "<string>", "<eval_with_key>")  # not a cell of a notebook or a line of a shell


def list_saved(model: Any, step: Callable[[], Any]) -> SavedTable:
    """See ``hyper_parallel.print_saved``; nothing is printed."""
    who = "print_saved"
    require_module(model, who)
    require_step(step, who)
    paths = ModulePaths()
    seen = _SavedValues(model, paths)
    with restored_after(model, device_of(model, who), who=who):
        paths.watch_module(TREE, "", model)
        try:
            with torch.autograd.graph.saved_tensors_hooks(seen.pack, _unchanged):
                step()
        finally:
            paths.remove()
    table = seen.table()
    if not table.rows and not table.weight_count and not table.unknown_count:
        raise PlanError(
            f"{who}: autograd saved nothing in this step. Give a step that computes a loss with this model, outside "
            "torch.no_grad(). What swapped layers hold is not autograd's: hp.stats() counts it."
        )
    return table


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclasses.dataclass
class _Row:
    count: int = 0
    nbytes: int = 0
    largest_bytes: int = 0
    largest: str = ""


class _SavedValues:
    """What was saved so far. A weak reference to a storage stays its own also when the bytes are freed and used again."""

    def __init__(self, model: nn.Module, paths: ModulePaths) -> None:
        self._paths = paths
        self._rows: dict[tuple[str, str], _Row] = {}
        self._counted: set[StorageWeakRef] = set()
        self._weights: set[StorageWeakRef] = set()
        self._saved_weights: dict[StorageWeakRef, int] = {}
        self._weight_count = 0
        self._unknown_count = 0
        for tensor in (*model.parameters(), *model.buffers()):
            reference, _ = _storage_of(tensor)
            if reference is not None:
                self._weights.add(reference)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count one value. What is returned is an alias: autograd's own output handed back to it would never be freed."""
        reference, nbytes = _storage_of(tensor)
        if reference is None:
            self._unknown_count += 1
        elif reference in self._weights or is_parameter_derived(tensor):
            self._weight_count += 1
            self._saved_weights[reference] = nbytes
        else:
            self._count(tensor, reference, nbytes)
        return alias(tensor)

    def _count(self, tensor: torch.Tensor, reference: StorageWeakRef, nbytes: int) -> None:
        stack = self._paths.stack
        row = self._rows.setdefault((stack[-1] if stack else "", _line_of_user(sys._getframe(2))), _Row())
        row.count += 1
        if reference in self._counted:
            return
        self._counted.add(reference)
        row.nbytes += nbytes
        if nbytes > row.largest_bytes:
            row.largest_bytes = nbytes
            row.largest = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

    def table(self) -> SavedTable:
        """Everything that was counted, largest first."""
        rows = [
            SavedRow(module=module, source=source, count=row.count, nbytes=row.nbytes, largest=row.largest)
            for (module, source), row in self._rows.items()
        ]
        return SavedTable(
            rows=tuple(sorted(rows, key=lambda row: -row.nbytes)),
            weight_count=self._weight_count,
            weight_bytes=sum(self._saved_weights.values()),
            unknown_count=self._unknown_count,
        )


def _storage_of(tensor: torch.Tensor) -> tuple[StorageWeakRef | None, int]:
    try:
        storage = tensor.untyped_storage()
        return StorageWeakRef(storage), storage.nbytes()
    except NO_STORAGE_ERRORS:
        return None, 0


def _line_of_user(frame: FrameType | None) -> str:
    """The innermost line outside torch and this library, as ``file.py:12``."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_NOT_THE_USERS, *_MADE_BY_PYTHON)):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(path: str) -> str:
    """From an installed package on; relative to the current folder where it is below; else its last two names."""
    _, mark, inside = path.rpartition(f"site-packages{os.sep}")
    if mark:
        return inside
    here = os.getcwd() + os.sep
    return path.removeprefix(here) if path.startswith(here) else os.sep.join(path.split(os.sep)[-2:])
