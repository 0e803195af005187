"""How many steps a process has done, told to the one that started it: a file with a byte for each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["add_step", "watched_steps"]

_PERIOD_S: Final = 0.5


def add_step(path: Path | None) -> None:
    """One more; nothing without a path."""
    if path is None:
        return
    with path.open("ab") as file:
        file.write(b".")


@contextlib.contextmanager
def watched_steps(path: Path, tell: Callable[[int], None]) -> Iterator[None]:
    """Tells of the steps in the file, twice a second; the file is gone afterwards."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_PERIOD_S):
            with contextlib.suppress(FileNotFoundError):
                tell(path.stat().st_size)

    path.unlink(missing_ok=True)
    watcher = threading.Thread(target=watch, name="hyper_parallel steps", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        path.unlink(missing_ok=True)
