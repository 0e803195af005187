"""Processes that judge numbered cases, one at a time: a crash or a hang is a result, and the process is replaced."""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

START_S = 180.0  # for a process to import everything and find its device
END_S = 10.0  # for a process to end when it is told to, or killed


class Worker:
    """One process. ``target`` is called with a connection: it answers every number until it receives None."""

    def __init__(self, arguments: tuple[Any, ...], *, limit_s: float, target: Callable[..., None]) -> None:
        self._arguments = arguments
        self._limit_s = limit_s
        self._target = target
        self.todo: collections.deque[int] = collections.deque()
        self.replies: list[dict[str, Any]] = []
        self.number = -1
        self.start()

    def start(self) -> None:
        """A fresh process."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=self._target, args=(theirs, *self._arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._has_answered = False

    def take(self, numbers: Iterable[int]) -> None:
        """A new chunk."""
        self.replies, self.todo = [], collections.deque(numbers)
        self.next()

    def next(self) -> None:
        """Send the next number."""
        self.number = self.todo.popleft()
        self.since = time.monotonic()
        with contextlib.suppress(OSError):  # a process that died between two cases is noticed by `answer`
            self.connection.send(self.number)

    def answer(self) -> dict[str, Any] | None:
        """The reply of the case that runs, a failure when its process died or hangs; None while it runs."""
        try:
            if self.connection.poll():
                reply: dict[str, Any] = self.connection.recv()
                self._has_answered = True
                return reply
        except (EOFError, ConnectionResetError):
            return self._lost("the process died")
        limit_s = self._limit_s + (0.0 if self._has_answered else START_S)
        return self._lost(f"no answer after {limit_s:.0f} s") if time.monotonic() - self.since > limit_s else None

    def _lost(self, why: str) -> dict[str, Any]:
        # It may have closed its pipe and still hang at its end, so it is killed in any case; and a process inside a driver's
        # call may outlive even that, so nobody waits for it without a limit.
        self.process.join(timeout=0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=END_S)
        code = self.process.exitcode
        self.start()
        return {"number": self.number, "kind": "crash", "detail": f"{why}, exit code {code}"}

    def end(self) -> None:
        """No more work."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(timeout=END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=END_S)


def judged(workers: list[Worker], chunks: collections.deque[Any]) -> Iterator[tuple[Worker, dict[str, Any], bool]]:
    """Every reply as it comes, with its worker, and whether it ends a chunk (then ``worker.replies`` is the whole of it)."""
    busy = []
    for worker in workers:
        worker.take(chunks.popleft())
        busy.append(worker)
    while busy:
        multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1.0)
        for worker in list(busy):
            reply = worker.answer()
            if reply is None:
                continue
            worker.replies.append(reply)
            yield worker, reply, not worker.todo
            if worker.todo:
                worker.next()
            elif chunks:
                worker.take(chunks.popleft())
            else:
                worker.end()
                busy.remove(worker)
