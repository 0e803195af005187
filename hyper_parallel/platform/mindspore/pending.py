"""Operations that were launched and not waited for, on the CPU.

MindSpore's CPU backend runs a collective inside the call, also when it is asked not to. A rank that launches one and
goes on must not be held up by ranks that come later, so here the launch only queues it: it runs when its handle, or
that of a later one, is waited for, or when the next collective begins. Between two ranks the backend keeps one order
of messages in each direction, which all groups and collectives share; so everything that receives runs in the order
in which it was launched, and a message is sent at once unless a collective is waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["PendingWork", "flush", "flush_collectives", "launch"]


class PendingWork:
    """The handle of a queued operation; ``wait`` runs everything that was queued before it, and it."""

    def __init__(self, run: Callable[[], Any], *, is_collective: bool) -> None:
        self.is_collective = is_collective
        self._run: Callable[[], Any] | None = run
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """Whether the operation has run."""
        return self._run is None

    def wait(self, timeout: Any = None) -> bool:
        """Run the queue up to this operation; MindSpore's own timeout is the only one."""
        while self._run is not None:
            _queue.popleft().execute()
        if self._error is not None:
            raise self._error
        return True

    def execute(self) -> None:
        """Run the operation; its error is raised by :meth:`wait`."""
        run, self._run = self._run, None
        assert run is not None
        try:
            run()
        except Exception as error:
            self._error = error


_queue: deque[PendingWork] = deque()


def launch(run: Callable[[], Any], *, is_collective: bool = True) -> PendingWork:
    """Queue an operation that receives."""
    work = PendingWork(run, is_collective=is_collective)
    _queue.append(work)
    return work


def flush() -> None:
    """Run everything that was launched, so that the next operation finds all ranks at the same place."""
    while _queue:
        _queue[-1].wait()


def flush_collectives() -> None:
    """Before a message is sent: run the queue if a collective, which also sends, is in it."""
    if any(work.is_collective for work in _queue):
        flush()
