"""More starting points for one search, each in a process of its own, on cores that would be idle.

A search is a descent from a few starting points, and its answer is as good as they are. ``fit_memory`` has a real device, and
such machines have many cores: each idle one searches from other points, for as long as the first search takes. Whatever goes
wrong with a worker costs its answer and nothing else. Plans made by ``plan_memory`` use no worker: they are the same everywhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from hyper_parallel.core.processes import launched_local_processes
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.search_worker import Found, Question

if TYPE_CHECKING:
    from typing import Self  # not in 3.10

__all__ = ["SearchWorkers", "idle_cores"]

_MOST: Final = 7
_PROGRAM: Final = "from hyper_parallel.planner.search_worker import serve; serve()"
_ROOT: Final = Path(__file__).resolve().parents[2]


def idle_cores() -> int:
    """How many workers there may be: the cores that this process may use, beside one for each rank of its host."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(0, min(_MOST, cores - (launched_local_processes() or 1)))


class _Worker:
    """One process, and the thread that reads its answers."""

    def __init__(self, answers: queue.Queue[Found]) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._profile: Profile | None = None  # that it has
        self._asked: int | None = None  # the question that it searches for
        self._thread = threading.Thread(target=self._read, args=(answers,), name="hyper_parallel search", daemon=True)
        self._thread.start()

    def ask(self, question: Question) -> bool:
        """Whether it took the question. One that still searches for an earlier one would not read it."""
        assert self._process.stdin is not None, "asked for"
        if self._asked is not None:
            return False
        self._asked = question.number
        if question.profile is self._profile:
            question = question._replace(profile=None)
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
        except OSError:  # it has died
            return False
        self._profile = self._profile if question.profile is None else question.profile
        return True

    def _read(self, answers: queue.Queue[Found]) -> None:
        assert self._process.stdout is not None, "asked for"
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):  # it has died, or was ended
            while True:
                found: Found = pickle.load(self._process.stdout)
                self._asked = None
                answers.put(found)
        if self._asked is not None:
            answers.put(Found(self._asked, ()))  # no other answer comes

    def end(self) -> None:
        """End it now; a search that runs is of no use any more."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # a question that it did not read is still to be written
                if pipe is not None:
                    pipe.close()


class SearchWorkers:
    """The workers of one fit. They are started with the first search and ended when the context is left.

    ``patience_seconds``: for how long they are waited for, beyond twice what the caller did meanwhile.
    """

    def __init__(self, count: int, *, patience_seconds: float = 0.5) -> None:
        self._count = count
        self._patience = patience_seconds
        self._answers: queue.Queue[Found] = queue.Queue()
        self._workers: list[_Worker] = []
        self._number = self._asked = 0
        self._begun = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def begin(
        self, profile: Profile, corrections: Corrections, budget: int, *, effort: float, known: Sequence[Solution] = ()
    ) -> None:
        """Search from as many other points as there are workers."""
        self._number += 1
        self._begun = time.perf_counter()
        count, self._count = self._count, 0
        with contextlib.suppress(OSError, ValueError):  # no process may be started here, or Python's path is not known
            for _ in range(count):
                self._workers.append(_Worker(self._answers))
        self._asked = sum(
            worker.ask(Question(self._number, profile, corrections, budget, stream, effort, tuple(known)))
            for stream, worker in enumerate(self._workers, start=1)
        )

    def collect(self) -> list[Solution]:
        """What they found, once all have answered; those that take twice as long as the caller did meanwhile are left out."""
        found: list[Solution] = []
        deadline = time.perf_counter() + self._patience + (time.perf_counter() - self._begun)
        while self._asked:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                break
            if answer.number == self._number:
                self._asked -= 1
                found.extend(answer.solutions)
        return found
