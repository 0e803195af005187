"""What a command prints: tables, words and progress for people, one JSON value for programs.

Rich draws where it is installed; without it the same tables are plain text. With ``--json`` nothing but the value goes to
standard output, and progress never goes there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Console"]


class Console:
    """Where one command writes."""

    def __init__(self, *, is_json: bool = False, is_plain: bool = False) -> None:
        self.is_json = is_json
        self._has_rich = not is_plain and importlib.util.find_spec("rich") is not None

    def data(self, value: Any) -> None:
        """The one value that ``--json`` asked for."""
        if self.is_json:
            print(json.dumps(value, indent=1, allow_nan=False))

    def say(self, text: str = "") -> None:
        """A line for people."""
        if not self.is_json:
            print(text)

    def note(self, text: str) -> None:
        """A line about what is going on; standard error, so that a pipe sees results only."""
        print(text, file=sys.stderr, flush=True)

    def table(
        self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)
    ) -> None:
        """A table for people; columns in ``words`` are read from the left."""
        if self.is_json:
            return
        if self._has_rich:
            _rich_table(title, heads, rows, words)
        else:
            print(plain_table(title, heads, rows, words))

    @contextlib.contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar with an estimate. The yielded function says what comes next, and that the thing before is done."""
        if self._has_rich and sys.stderr.isatty():
            with _rich_progress(what, total) as advance_bar:
                yield advance_bar
            return
        started, done = time.monotonic(), 0

        def advance(text: str) -> None:
            nonlocal done
            spent = time.monotonic() - started
            left = f", about {spent / done * (total - done):.0f} s left" if done else ""
            self.note(f"[{min(done + 1, total)}/{total}] {text} ({spent:.0f} s so far{left})")
            done += 1

        yield advance


def plain_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """The table as text, for terminals without rich."""
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        shown = [cell.ljust(w) if at in words else cell.rjust(w) for at, (cell, w) in enumerate(zip(cells, widths))]
        return "  ".join(shown).rstrip()

    return "\n".join([title, line(heads), line(["-" * width for width in widths]), *(line(row) for row in rows)])


def _rich_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int]) -> None:
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", header_style="bold")
    for at, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if at in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))  # Text: names are no markup
    console = RichConsole()
    if not console.is_terminal:
        console = RichConsole(width=120)
    console.print(table)


def _style(cell: str) -> str:
    return {"bitwise equal": "green", "yes": "green", "DIFFERENT": "bold red", "no": "red"}.get(cell, "")


@contextlib.contextmanager
def _rich_progress(what: str, total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        is_first = True

        def advance(text: str) -> None:
            nonlocal is_first
            progress.update(task, description=text, advance=0 if is_first else 1)
            is_first = False

        yield advance
