"""Counts what autograd saves in one step, by module and line of source code. A framework says what a storage is."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Hashable, Sequence
from types import FrameType, ModuleType
from typing import Final

import hyper_parallel
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.saved import SavedRow, SavedTable

__all__ = ["SavedValues"]

_MADE_BY_PYTHON: Final = ("<frozen ", "<string>", "<eval_with_key>")  # not a cell of a notebook or a line of a shell


@dataclasses.dataclass
class _Row:
    count: int = 0
    nbytes: int = 0
    largest_bytes: int = 0
    largest: str = ""


class SavedValues:
    """What was saved so far. ``framework`` is the framework's package, whose lines are no user's.

    A storage is named by whatever the framework has: the name may be used again once :meth:`forget` was called with it.
    """

    def __init__(self, paths: ModulePaths, framework: ModuleType) -> None:
        self._paths = paths
        self._not_the_users = tuple(
            os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (framework, hyper_parallel)
        )
        self._rows: dict[tuple[str, str], _Row] = {}
        self._counted: set[Hashable] = set()
        self._saved_weights: dict[Hashable, int] = {}
        self._weight_count = 0
        self._unknown_count = 0

    def add_unknown(self) -> None:
        """A value was saved whose bytes are not known."""
        self._unknown_count += 1

    def add_weight(self, storage: Hashable, nbytes: int) -> None:
        """A parameter, a buffer, or a copy of one was saved."""
        self._weight_count += 1
        self._saved_weights[storage] = nbytes

    def add(self, storage: Hashable, nbytes: int, shape: Sequence[int], dtype: str) -> None:
        """Another value was saved."""
        stack = self._paths.stack
        where = stack[-1] if stack else "", self._line_of_user(sys._getframe(1))
        row = self._rows.setdefault(where, _Row())
        row.count += 1
        if storage in self._counted:
            return
        self._counted.add(storage)
        row.nbytes += nbytes
        if nbytes > row.largest_bytes:
            row.largest_bytes = nbytes
            row.largest = f"{list(shape)} {dtype}"

    def forget(self, storage: Hashable) -> None:
        """Nothing holds this storage any more: its name may be another's from now on."""
        self._counted.discard(storage)

    def table(self, who: str, *, outside: str) -> SavedTable:
        """Everything that was counted, largest first. ``outside``: in what a step must not run, for the error."""
        if not self._rows and not self._weight_count and not self._unknown_count:
            raise PlanError(
                f"{who}: autograd saved nothing in this step. Give a step that computes a loss with this model, outside "
                f"{outside}. What swapped layers hold is not autograd's: hp.stats() counts it."
            )
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

    def _line_of_user(self, frame: FrameType | None) -> str:
        """The innermost line outside the framework and this library, as ``file.py:12``."""
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith((*self._not_the_users, *_MADE_BY_PYTHON)):
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
