"""What autograd saves in one step, by module and line of source code: where the memory of activations goes.

This module knows rows and text; the framework's part says what was saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.config import show_bytes
from hyper_parallel.planner.backend import Model, Step, planner_backend

__all__ = ["SavedRow", "SavedTable", "print_saved"]

_SHOWN_ROWS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedRow:
    """What one line of source code, run in one module, had autograd save."""

    module: str
    """The path of the innermost module that ran; empty: none of the model's."""
    source: str
    """File and line, the innermost that belongs neither to the framework nor to this library; empty: there is none."""
    count: int
    """Values, each time one was saved."""
    nbytes: int
    """Of the storages that were saved here first."""
    largest: str
    """Shape and dtype of the largest of them; empty where all were saved before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedTable(Sequence[SavedRow]):
    """Everything that autograd saved in one step, largest first. Printed, it is a table."""

    rows: tuple[SavedRow, ...]
    weight_count: int
    """Values that were parameters or buffers of the model, or (on torch) copies of parameters in another dtype."""
    weight_bytes: int
    """Their storages: held with and without a backward, so they are in no row."""
    unknown_count: int = 0
    """Values of kinds whose bytes are not known (sparse tensors, subclasses without a storage)."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self.rows[at]

    def __iter__(self) -> Iterator[SavedRow]:
        return iter(self.rows)

    @property
    def total_bytes(self) -> int:
        """Of all rows; every storage once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def total_count(self) -> int:
        """Of all rows."""
        return sum(row.count for row in self.rows)

    def summary(self, most_rows: int = _SHOWN_ROWS) -> str:
        """The largest rows as a table, what is left out of it, and the total."""
        cells = self.cells(most_rows)
        widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if at < 2 else cell.ljust(width) for at, (cell, width) in enumerate(zip(line, widths))
            )
            for line in cells
        ]
        return "\n".join([*(line.rstrip() for line in lines), *self.closing_lines(most_rows)])

    def cells(self, most_rows: int = _SHOWN_ROWS) -> list[tuple[str, ...]]:
        """Heads and the largest rows, as text."""
        rows = [
            (show_bytes(row.nbytes), str(row.count), row.module or "-", row.source or "-", row.largest or "-")
            for row in self.rows[:most_rows]
        ]
        return [("bytes", "values", "module", "source", "largest"), *rows]

    def closing_lines(self, most_rows: int = _SHOWN_ROWS) -> list[str]:
        """What is left out of the table, and the total."""
        lines = []
        left_out = self.rows[most_rows:]
        if left_out:
            nbytes = show_bytes(sum(row.nbytes for row in left_out))
            lines.append(f"and {len(left_out)} smaller rows with {nbytes}")
        lines.append(
            f"saved for backward: {show_bytes(self.total_bytes)} in {self.total_count} values; besides, weights: "
            f"{show_bytes(self.weight_bytes)} in {self.weight_count} values"
        )
        if self.unknown_count:
            lines.append(
                f"{self.unknown_count} more values have no storage of their own, and their bytes are not known"
            )
        return lines

    def __str__(self) -> str:
        return self.summary()


def print_saved(model: Model, step: Step, *, most_rows: int = _SHOWN_ROWS) -> SavedTable:
    """Print what autograd saves in one step: bytes and number by module and line of source code, largest first.

    ``step`` runs once. It leaves no trace: gradients, buffers and random state are as before. A storage that several ops save is
    counted once, where it was saved first; weights are counted apart. Of a layer that is recomputed, only its inputs are in the
    table; of one that is swapped, nothing.

    Args:
        model: the model that the step trains.
        step: runs one forward and backward, without an optimizer.
        most_rows: how many rows are printed; the returned table has all of them.

    Returns:
        The table: rows with ``module``, ``source``, ``count`` and ``nbytes``, and ``total_bytes``.

    Raises:
        PlanError: the step saves nothing, or changes what cannot be put back.
    """
    if isinstance(most_rows, bool) or not isinstance(most_rows, int) or most_rows < 1:
        raise ValueError(f"print_saved: most_rows must be a whole number of 1 or more, got {most_rows!r}")
    table = planner_backend().list_saved(model, step)
    print(table.summary(most_rows))
    return table
