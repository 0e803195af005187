"""The threads that move bytes between memory and a file, and the completions that callers wait for.

They know jobs, sizes and order: reads go before writes, because compute waits for a read, and each direction has a
bounded number of queued bytes, because queued bytes are memory that cannot be freed. They know no file and no lease.

Every wait here has an end: a worker that dies fails its job, a pool without workers fails every wait, and so does one
in which nothing at all was moved for ``wait_limit_s``.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Event, FlatBytes, Stream
from hyper_parallel.errors import DiskTierError, again

__all__ = ["DiskCompletion", "Direction", "Job", "Workers"]

NUM_WORKERS: Final = 2  # one large direct call is many requests already; four readers were slower than two
QUEUE_BYTES: Final = 256 * 2**20
WAIT_LIMIT_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.5  # how often a waiting thread checks that the workers still live


class Direction(enum.Enum):
    """Which way a job moves bytes."""

    READ = "read"
    WRITE = "write"


class DiskCompletion:
    """The end of a copy that a worker carries, in whole (a host buffer) or up to its last piece (a device's stream).

    After a piece was queued on a stream, ``event`` is what its consumers are ordered after. ``target``: the device bytes of a
    load. They are held until a stream is ordered after it: a caller that is interrupted before it
    got the completion leaves it to the worker, which drops it, with the bytes, when the copy is done.
    """

    __slots__ = ("__weakref__", "_backend", "_error", "_event", "_queued", "_target", "_workers", "end_us", "start_us")

    def __init__(self, workers: Workers, backend: DeviceBackend, target: FlatBytes | None = None) -> None:
        self._target = target
        self._workers = workers
        self._backend = backend
        self._queued = threading.Event()
        self._event: Event | None = None
        self._error: BaseException | None = None
        self.start_us = 0.0  # when a worker began and ended, on time.perf_counter's clock
        self.end_us = 0.0

    def is_done(self) -> bool:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.Completion`."""
        return self._queued.is_set() and (self._event is None or self._backend.event_is_done(self._event))

    def is_ordered_before(self, stream: Stream) -> bool:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.Completion`."""
        return False

    def order(self, stream: Stream) -> None:
        """Hold the caller until the worker queued its last piece, then order ``stream`` after it."""
        self._wait_for_worker()
        if self._event is not None:
            self._backend.wait_event(stream, self._event)
        self._target = None
        self._raise()

    def wait(self) -> None:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.Completion`."""
        self._wait_for_worker()
        if self._event is not None:
            self._backend.synchronize_event(self._event)
        self._target = None
        self._raise()

    def finish(self, event: Event | None = None) -> None:
        """The bytes are there, or will be after ``event``. Called by the worker."""
        self._event = event
        self._queued.set()

    def set_failure(self, error: BaseException) -> None:
        """Keep an error: ``order`` and ``wait`` raise it, once the copy has ended. Called by the worker."""
        if self._error is None:
            self._error = again(error)

    def fail(self, error: BaseException) -> None:
        """The copy has ended, because of ``error``. Called by the worker."""
        self.set_failure(error)
        self._queued.set()

    def __del__(self) -> None:
        if self._target is None or self._event is None or sys.is_finalizing():
            return
        with contextlib.suppress(Exception):  # the device is gone
            self._backend.wait_event(self._backend.current_stream(), self._event)
            self._backend.synchronize_event(self._event)

    def _wait_for_worker(self) -> None:
        if not self._queued.is_set():
            self._workers.wait(self._queued)

    def _raise(self) -> None:
        """Only after the order: pieces that were queued before the error still use the caller's bytes."""
        if self._error is not None:
            raise again(self._error)


class Job:
    """Some bytes to move: what to do, and the completion that is told."""

    __slots__ = ("completion", "direction", "nbytes", "run")

    def __init__(
        self, direction: Direction, nbytes: int, completion: DiskCompletion, run: Callable[[DiskCompletion], None]
    ) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self.completion = completion
        self.run = run  # holds the source or target alive until the job is dropped


class Workers:
    """A few daemon threads and their bounded queue. ``place`` names in errors what they work for."""

    def __init__(
        self,
        place: str,
        *,
        num_workers: int = NUM_WORKERS,
        queue_bytes: int = QUEUE_BYTES,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.num_workers = num_workers
        self._place = place
        self._queue_bytes = queue_bytes
        self._wait_limit_s = wait_limit_s
        self._changed = threading.Condition()
        self._jobs: dict[Direction, collections.deque[Job]] = {way: collections.deque() for way in Direction}
        self._queued_bytes = dict.fromkeys(Direction, 0)
        self._num_unfinished = 0
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._stopping = False
        self._last_progress_s = time.monotonic()

    def submit(self, job: Job, *, may_wait: bool = True) -> None:
        """Queue a job; holds the caller while its direction's queue is full, unless a worker is the caller."""
        with self._changed:
            self._start()
            began_s = time.monotonic()
            # A job larger than the whole queue enters an empty one.
            while may_wait and 0 < self._queued_bytes[job.direction] > self._queue_bytes - job.nbytes:
                self._changed.wait(_LOOK_EVERY_S)
                problem = self._problem(began_s)
                if problem is not None:
                    raise problem
            self._num_unfinished += 1
            self._queued_bytes[job.direction] += job.nbytes
            self._jobs[job.direction].append(job)
            self._changed.notify_all()

    def wait(self, happened: threading.Event) -> None:
        """Hold the caller until ``happened``, or raise when no worker is left that could make it happen."""
        began_s = time.monotonic()
        while not happened.wait(_LOOK_EVERY_S):
            with self._changed:
                problem = self._problem(began_s)
            if problem is not None and not happened.is_set():
                raise problem

    def progressed(self) -> None:
        """Some bytes were moved: callers that wait may go on waiting."""
        self._last_progress_s = time.monotonic()

    def wait_until_idle(self) -> None:
        """Hold the caller until every queued job has ended."""
        began_s = time.monotonic()
        with self._changed:
            while self._num_unfinished and self._threads:
                self._changed.wait(_LOOK_EVERY_S)
                problem = self._problem(began_s)
                if problem is not None and self._num_unfinished:
                    raise problem

    def stop(self, *, join: bool) -> None:
        """Let the threads end once the queue is empty. A thread that is itself one of them cannot join."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if join:
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(self._wait_limit_s)

    def _start(self) -> None:
        # Workers that died are replaced; in a forked child they are not: its parent uses the same file.
        has_living = any(thread.is_alive() for thread in self._threads)
        if not self._threads or (not has_living and os.getpid() == self._pid):
            self._threads = []
            self._last_progress_s = time.monotonic()
            for number in range(self.num_workers):
                thread = threading.Thread(target=self._work, name=f"hyper_parallel disk {number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _problem(self, began_s: float) -> DiskTierError | None:
        if self._threads and not any(thread.is_alive() for thread in self._threads):
            problem = DiskTierError(
                f"disk tier: cannot move bytes to or from {self._place}; because all its worker threads have ended; "
                "after a fork or at the end of the program, build a new SwapManager"
            )
            self._abandon(problem)
            return problem
        if time.monotonic() - max(began_s, self._last_progress_s) > self._wait_limit_s:
            return DiskTierError(
                f"disk tier: cannot wait longer for {self._place}; because nothing moved for {self._wait_limit_s} s; "
                "look for a disk that hangs, or choose another SwapConfig.disk_path"
            )
        return None

    def _abandon(self, problem: DiskTierError) -> None:
        """No worker is left for what is queued: callers that wait get an error, bytes are dropped. The caller holds the lock."""
        for direction, jobs in self._jobs.items():
            for job in jobs:
                job.completion.fail(problem)
            self._num_unfinished -= len(jobs)
            self._queued_bytes[direction] = 0
            jobs.clear()

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            try:
                job.completion.start_us = time.perf_counter() * 1e6
                job.run(job.completion)
            except BaseException as error:  # whatever it is, no caller may wait for a job that will not be done
                job.completion.fail(error)
            finally:
                job.completion.end_us = time.perf_counter() * 1e6
                if not job.completion._queued.is_set():
                    job.completion.fail(
                        DiskTierError(f"disk tier: a worker for {self._place} ended in the middle of a job")
                    )
                self.progressed()
                job = None  # drops the source or target here, outside every lock
                with self._changed:
                    self._num_unfinished -= 1
                    self._changed.notify_all()

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                for direction in (Direction.READ, Direction.WRITE):
                    if self._jobs[direction]:
                        job = self._jobs[direction].popleft()
                        self._queued_bytes[direction] -= job.nbytes
                        self._changed.notify_all()
                        return job
                if self._stopping:
                    return None
                self._changed.wait()
