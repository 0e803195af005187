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

from hyper_parallel.cli.time_left import TimeLeft, in_words

__all__ = ["Console", "Progress"]


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
    def progress(self, what: str, total: int, *, shares: Sequence[float] | None = None) -> Iterator[Progress]:
        """A bar with an estimate; see :class:`Progress`.

        ``shares``: about how long each part takes, beside the others. Without them nothing is said of the time that is
        left: parts that differ by a factor of ten would make it a guess.
        """
        progress = Progress(total, shares, self.note)
        if self._has_rich and sys.stderr.isatty():
            with _rich_bar(what, progress):
                yield progress
        else:
            yield progress


class Progress:
    """What a command does now, and about how long it will still take.

    A call says which part comes next, and that the part before is done; ``reach`` says how much of the part is. What is left
    of the share of a part that told this, and ended sooner, is taken from the whole.
    """

    def __init__(self, total: int, shares: Sequence[float] | None, note: Callable[[str], None]) -> None:
        self._total = total
        self._shares = shares or [1.0] * total
        self._note = note
        self._started = self._said = time.monotonic()
        self._left = None if shares is None else TimeLeft(sum(shares), self._started)
        self._text = ""
        self._began = 0
        self._part: float | None = None  # of the share of the part that runs; None: it does not tell
        self._before = 0.0  # done in the parts that are over
        self.show: Callable[[str, float], None] | None = None  # a bar that takes words and the share that is done

    def __call__(self, text: str) -> None:
        """This part begins."""
        if self._began:
            share = self._shares[self._began - 1]
            done = share if self._part is None else self._part
            self._before += done
            if self._left is not None:
                self._left.shrink(share - done)
                self._left.reach(self._before, time.monotonic())
        self._text, self._began, self._part = text, min(self._began + 1, self._total), None
        self._say()

    def reach(self, share: float) -> None:
        """So much of this part is done, between 0 and 1."""
        self._part = min(max(share, 0.0), 1.0) * self._shares[self._began - 1]
        if self._left is not None:
            self._left.reach(self._before + self._part, time.monotonic())
        if self.show is not None or time.monotonic() - self._said >= _AGAIN_S:
            self._say()

    def _say(self) -> None:
        now = self._said = time.monotonic()
        spent = now - self._started
        times = [f"{spent:.0f} s so far"] if spent >= 1 else []
        left = None if self._left is None else self._left.seconds(now)
        if left is not None:
            times.append(f"{in_words(left)} left")
        shown = f" ({', '.join(times)})" if times else ""
        line = f"[{self._began}/{self._total}] {self._text}{shown}"
        if self.show is None:
            self._note(line)
        else:
            self.show(line, (self._began - 1) / self._total)


_AGAIN_S: Final = 20.0  # without a bar: after so long a line says again how far it is
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
def _rich_bar(what: str, progress: Progress) -> Iterator[None]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
    with RichProgress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        progress.show = lambda line, done: bar.update(task, description=line, completed=done)
        yield
