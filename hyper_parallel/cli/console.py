"""What a command prints: tables, words and progress for people, one JSON value for programs.

Rich draws where it is installed; without it the same tables are plain text. With ``--json`` nothing but the value goes to
standard output, and progress never goes there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

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
        """A line for people, wrapped where the terminal is narrower."""
        if self.is_json:
            return
        width = _width()
        if width is None or len(text) <= width or "\n" in text:
            print(text)
        else:
            print(textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))

    def note(self, text: str) -> None:
        """A line about what is going on; standard error, so that a pipe sees results only."""
        print(text, file=sys.stderr, flush=True)

    def table(
        self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)
    ) -> None:
        """A table for people; columns in ``words`` are read from the left."""
        if self.is_json:
            return
        width = _width()
        if width is not None and width < _WIDE and _natural_width(heads, rows) > width:
            print(stacked_table(title, heads, rows, width))
        elif self._has_rich:
            _rich_table(title, heads, rows, words)
        else:
            print(plain_table(title, heads, rows, words))

    @contextlib.contextmanager
    def waiting(self, what: str, *, every_s: float = 20.0) -> Iterator[None]:
        """Says what goes on, and again every ``every_s`` seconds until it is over."""
        self.note(f"{what} ...")
        over, started = threading.Event(), time.monotonic()

        def say_again() -> None:
            while not over.wait(every_s):
                self.note(f"{what} ... ({time.monotonic() - started:.0f} s so far)")

        speaker = threading.Thread(target=say_again, daemon=True)
        speaker.start()
        try:
            yield
        finally:
            over.set()
            speaker.join()

    @contextlib.contextmanager
    def progress(
        self, what: str, total: int, *, shares: Sequence[float] | None = None
    ) -> Iterator[Callable[[str], None]]:
        """A bar with an estimate. The yielded function says what comes next, and that the thing before is done.

        ``shares``: about how long each part takes, beside the others. Without them nothing is said of the time that is
        left: parts that differ by a factor of ten would make it a guess.
        """
        if self._has_rich and sys.stderr.isatty():
            with _rich_progress(what, total, shares) as advance_bar:
                yield advance_bar
            return
        started, done = time.monotonic(), 0

        def advance(text: str) -> None:
            nonlocal done
            spent = time.monotonic() - started
            times = [f"{spent:.0f} s so far"] if spent >= 1 else []
            if done and shares is not None:
                times.append(f"{_rounded(spent / sum(shares[:done]) * sum(shares[done:]))} left")
            shown = f" ({', '.join(times)})" if times else ""
            self.note(f"[{min(done + 1, total)}/{total}] {text}{shown}")
            done += 1

        yield advance


_WIDE: Final = 100  # from here on a table that does not fit is folded, below it is written one row after the other


def _width() -> int | None:
    """How wide the reader's screen is; None for a pipe, which has no width."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def _natural_width(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    return sum(widths) + 3 * len(widths) + 1


def stacked_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """The table for a narrow screen: each row's first cell, and below it the others with their heads."""
    lines = textwrap.wrap(title, width)
    for row in rows:
        lines += textwrap.wrap(row[0], width, break_on_hyphens=False) or ["-"]
        cells = ", ".join(f"{head} {cell}".lstrip() for head, cell in zip(heads[1:], row[1:]) if cell)
        lines += textwrap.wrap(cells, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _rounded(seconds: float) -> str:
    """An estimate for a person, no finer than it is good."""
    if seconds < 10:
        return "a few seconds"
    return f"about {round(seconds, -1):.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


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
def _rich_progress(what: str, total: int, shares: Sequence[float] | None) -> Iterator[Callable[[str], None]]:
    from rich.console import Console as RichConsole
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    ]
    if shares is not None:
        columns += [TimeRemainingColumn()]
    parts = list(shares) if shares is not None else [1.0] * total
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=sum(parts))
        done = 0

        def advance(text: str) -> None:
            nonlocal done
            progress.update(task, description=text, completed=sum(parts[:done]))
            done += 1

        yield advance
