"""A file as far memory: space is promised only where the file system has it, and bytes are moved by worker threads.

Where the device *is* host memory, a worker writes straight from the source and reads straight into the target, and the
copy's completion is the end of that. On a real device the bytes pass through two small pinned buffers per worker, so
that one piece is copied while the other is written; the completion of ``write`` is then that of the last copy off the
device, and the completion of ``read`` that of the last copy onto it.

What happens when the disk fails
--------------------------------
1. A write that fails loses nothing: the pieces that did not reach the file stay in host memory, and ``read`` serves
   them from there until the lease is released.
2. The completion of that write raises :class:`DiskTierError`, which names the path, from ``order`` and ``wait`` (on a
   real device only if the failure came before the caller asked; the source may be dropped by then, see 1).
3. From then on ``reserve`` refuses with ``NO_SPACE``: new bytes go elsewhere or stay where they are. ``failure`` keeps
   the first error for reports.
4. A read that fails raises from its completion's ``order`` and ``wait``.

A read of a lease whose write has not ended starts when it has. A lease that is released before its write began is not
written at all. ``release`` only sets a flag and appends to a deque, as destructors need; see ``host.py``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from hyper_parallel.core.activation_checkpoint.adapter import Completion, DeviceBackend, Event, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.far.arena import Arena, SlabRange
from hyper_parallel.core.activation_checkpoint.far.disk_file import BLOCK_BYTES, SwapFile, copy_bytes, residue_of
from hyper_parallel.core.activation_checkpoint.far.disk_workers import (
    WAIT_LIMIT_S,
    Direction,
    DiskCompletion,
    Job,
    Workers,
)
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal, TierStatistics
from hyper_parallel.errors import DiskTierError, FarMemoryError, again

__all__ = ["DiskTier"]

GROWTH_BYTES: Final = 64 * 2**20
STAGING_BYTES: Final = 8 * 2**20  # one pinned buffer; each worker has two
PIECE_BYTES: Final = 64 * 2**20  # where no staging is needed: how much one call moves
RESERVE_BYTES: Final = 2**30  # left free on the file system for others, or a twentieth of a small one


class DiskTier:
    """A private file in ``directory``; see :class:`~hyper_parallel.core.activation_checkpoint.far.tier.Tier`."""

    name = "disk"

    def __init__(
        self,
        directory: str,
        *,
        limit_bytes: int | None,
        budget: HostBudget,
        wait_limit_s: float = WAIT_LIMIT_S,
        count_sharers: Callable[[], int] = lambda: 1,
    ) -> None:
        self.failure: DiskTierError | None = None
        self._limit_bytes = limit_bytes
        self._budget = budget  # the staging buffers are host memory too
        self._file = SwapFile(directory)
        self._reserve_bytes = min(RESERVE_BYTES, self._file.total_bytes() // 20)
        self._first_space = max(0, self._file.free_bytes() - self._reserve_bytes)
        self._count_sharers = count_sharers  # processes that have the same disk_path by default
        self._workers = Workers(self._file.path, wait_limit_s=wait_limit_s)
        # An interrupt may lose a lease on its way to its owner: then its space is never returned, and close() cannot end the
        # threads. They end with the tier in any case.
        weakref.finalize(self, self._workers.stop, join=False)
        self._arena = Arena(BLOCK_BYTES)
        self._slab: int | None = None
        self._staging: dict[tuple[type, str], _StagingPool] = {}
        self._lock = threading.Lock()
        self._released: collections.deque[tuple[Lease, Completion | None]] = collections.deque()
        self._in_flight: list[tuple[Lease, Completion | None]] = []
        self._closed = self._shut = False
        self._live_bytes = self._peak_live_bytes = 0
        self._allocations = self._refusals = 0
        self._written_bytes = self._read_bytes = 0

    @property
    def is_direct(self) -> bool:
        """Whether bytes go around the page cache."""
        return self._file.is_direct

    def reserve(self, backend: DeviceBackend, nbytes: int) -> Lease | Refusal:
        """Space for ``nbytes`` whose blocks the file system has already set aside, or why there is none."""
        if nbytes < 1:
            raise ValueError(f"DiskTier.reserve: expected at least 1 byte, got {nbytes}")
        with self._lock:
            self._drain()
            if self._closed:
                raise FarMemoryError(f"disk: cannot lend {nbytes} bytes; because this tier was closed; build a new one")
            refusal = self._prepare(backend, self._arena.round_up(nbytes))
            if refusal is not None:
                self._refusals += 1
                return refusal
            ranges = self._arena.take(nbytes)
            assert ranges is not None
            self._live_bytes += nbytes
            self._peak_live_bytes = max(self._peak_live_bytes, self._live_bytes)
            return Lease(self, nbytes, _DiskExtent(ranges, nbytes))

    def write(
        self, lease: Lease, source: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copy to the file; holds the caller only while the queue of unwritten bytes is full."""
        extent: _DiskExtent = lease.extent
        copy = _Copy(extent, source, backend, stream, ready)
        if not backend.is_host_memory:
            backend.wait_event(stream, ready)
        completion = DiskCompletion(self._workers, backend)
        with self._lock:
            extent.state = _State.WRITING
            extent.num_jobs += 1
            self._written_bytes += lease.nbytes
        self._submit(extent, Job(Direction.WRITE, lease.nbytes, completion, lambda end: self._run_write(copy, end)))
        return completion

    def read(
        self, lease: Lease, target: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copy back, after the copy out."""
        extent: _DiskExtent = lease.extent
        copy = _Copy(extent, target, backend, stream, ready)
        if extent.state is _State.EMPTY:
            raise FarMemoryError(
                f"disk: cannot read a lease of {lease.nbytes} bytes; because nothing was written to it"
            )
        if not backend.is_host_memory:
            backend.wait_event(stream, ready)
        completion = DiskCompletion(self._workers, backend, None if backend.is_host_memory else target)
        job = Job(Direction.READ, lease.nbytes, completion, lambda end: self._run_read(copy, end))
        with self._lock:
            extent.num_jobs += 1
            self._read_bytes += lease.nbytes
            if extent.state is _State.WRITING:
                extent.waiting.append(job)
                return completion
        self._submit(extent, job)
        return completion

    def residue_bytes(self, lease: Lease) -> int | None:
        """How far after a block's first address a host buffer must begin for ``read`` to fill it without a copy.

        None while that is not known: nothing was written yet, or not from host memory.
        """
        extent: _DiskExtent = lease.extent
        return extent.residue_bytes

    def release(self, lease: Lease, after: Completion | None) -> None:
        """Take the space back once ``after`` is done and no worker uses it. Takes no lock it could already hold."""
        lease.extent.is_released = True
        self._released.append((lease, after))
        if self._closed:  # no later reserve will drain it
            self._drain_if_free()

    def statistics(self) -> TierStatistics:
        """What it holds and has done so far."""
        with self._lock:
            self._drain()
            return TierStatistics(
                name=self.name,
                live_bytes=self._live_bytes,
                peak_live_bytes=self._peak_live_bytes,
                held_bytes=self._arena.held_bytes,
                peak_held_bytes=self._arena.held_bytes,  # the file never shrinks while it is used
                allocations=self._allocations,
                written_bytes=self._written_bytes,
                read_bytes=self._read_bytes,
                refusals=self._refusals,
                limit_bytes=self._limit_bytes,
            )

    def close(self) -> None:
        """End the workers and give the file back; while leases are out, the last release does that."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(
            DiskTierError
        ):  # the caller that waits for those bytes gets the error; closing goes on
            self._workers.wait_until_idle()
        with self._lock:
            self._drain()
            in_flight = [after for _, after in self._in_flight if after is not None]
        for completion in in_flight:
            with contextlib.suppress(Exception):  # its owner was told
                completion.wait()
        with self._lock:
            self._drain()
        if self._shut:
            self._workers.stop(join=True)

    def retire(self) -> None:
        """Called when nothing will reserve any more. Close without a wait: now, or with the last release or job."""
        self._closed = True
        self._drain_if_free()

    def _drain_if_free(self) -> None:
        """Safe in destructors, also of a thread that holds the lock."""
        if self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _prepare(self, backend: DeviceBackend, wanted_bytes: int) -> Refusal | None:
        if self.failure is not None:
            return Refusal.NO_SPACE
        if not backend.is_host_memory and not self._has_staging(backend):
            return Refusal.OVER_LIMIT
        needed = wanted_bytes - self._arena.free_bytes
        return None if needed <= 0 else self._grow(needed)

    def _grow(self, needed_bytes: int) -> Refusal | None:
        limit = self._arena.held_bytes + needed_bytes if self._limit_bytes is None else self._limit_bytes
        if self._arena.held_bytes + needed_bytes > limit:
            return Refusal.OVER_LIMIT
        space = self._file.free_bytes() - self._reserve_bytes
        sharers = self._count_sharers() if self._limit_bytes is None else 1
        if sharers > 1:  # the others are to find space too, also where they ask later
            space = min(space, self._first_space // sharers - self._arena.held_bytes)
        if needed_bytes > space:
            return Refusal.NO_SPACE
        capped = space if self._limit_bytes is None else min(space, self._limit_bytes - self._arena.held_bytes)
        growth = max(needed_bytes, min(GROWTH_BYTES, capped // BLOCK_BYTES * BLOCK_BYTES))
        try:
            self._file.grow(growth)
        except OSError:
            return Refusal.NO_SPACE
        if self._slab is None:
            self._slab = self._arena.add_slab(growth)
        else:
            self._arena.extend_slab(self._slab, growth)
        self._allocations += 1
        return None

    def _has_staging(self, backend: DeviceBackend) -> bool:
        key = (type(backend), backend.name)
        if key not in self._staging:
            nbytes = (2 * STAGING_BYTES + BLOCK_BYTES) * self._workers.num_workers
            if not self._budget.charge(nbytes):
                return False
            try:
                self._staging[key] = _StagingPool(backend, self._workers.num_workers, nbytes)
            except MemoryError:
                self._budget.refund(nbytes)
                return False
        return True

    def _drain(self) -> None:
        while self._released:
            lease, after = self._released.popleft()
            self._live_bytes -= lease.nbytes
            self._in_flight.append((lease, after))
        still: list[tuple[Lease, Completion | None]] = []
        for lease, after in self._in_flight:
            extent: _DiskExtent = lease.extent
            if extent.num_jobs or not (after is None or after.is_done()):
                still.append((lease, after))
            else:
                self._arena.give(extent.ranges)
                extent.kept.clear()
        self._in_flight = still
        if self._closed and not self._shut and not self._arena.lent_bytes:
            self._shut = True
            self._workers.stop(join=False)
            self._file.close()
            for pool in self._staging.values():
                self._budget.refund(pool.nbytes)
            self._staging.clear()

    def _submit(self, extent: _DiskExtent, job: Job) -> None:
        try:
            self._workers.submit(job)
        except BaseException:
            with self._lock:
                extent.num_jobs -= 1
            raise

    def _run_write(self, copy: _Copy, completion: DiskCompletion) -> None:
        extent = copy.extent
        try:
            with self._lock:
                is_wanted = not (extent.is_released and extent.num_jobs == 1)
            if not is_wanted:
                completion.finish()
            elif copy.backend.is_host_memory:
                self._write_in_place(copy, completion)
                copy.flat = None  # the caller may count on its bytes being free once the copy is done
                completion.finish()
            else:
                self._write_staged(copy, completion)
        finally:
            with self._lock:
                extent.state = _State.WRITTEN
                extent.num_jobs -= 1
                waiting, extent.waiting = extent.waiting, []
                self._close_after_last_job()
            for job in waiting:
                self._workers.submit(job, may_wait=False)

    def _write_in_place(self, copy: _Copy, completion: DiskCompletion) -> None:
        copy.backend.synchronize_event(copy.ready)
        view = copy.backend.host_view(copy.flat)
        copy.extent.residue_bytes = residue_of(view)
        for piece in copy.extent.pieces(PIECE_BYTES):
            part = view[piece.start : piece.start + piece.nbytes]
            # On failure the source itself is what is kept: it is host memory, and a saved value is not changed.
            self._store(copy.extent, piece, part, part, completion)

    def _write_staged(self, copy: _Copy, completion: DiskCompletion) -> None:
        backend, extent = copy.backend, copy.extent
        with self._staging[type(backend), backend.name].pair() as buffers:
            queued: tuple[_Piece, _Buffer, Event] | None = None
            for number, piece in enumerate(extent.pieces(STAGING_BYTES)):
                buffer = buffers[number % 2]
                buffer.wait_until_idle(backend)
                part = copy.flat[piece.start : piece.start + piece.nbytes]
                backend.copy(buffer.flat[: piece.nbytes], part, copy.stream)
                event = backend.record_event(copy.stream)
                if queued is not None:
                    self._store_staged(copy, *queued, completion)
                queued = (piece, buffer, event)
                del part
            assert queued is not None
            completion.finish(queued[2])
            # The last piece's copy ends everything on the device: its bytes are let go before the slow part.
            backend.synchronize_event(queued[2])
            copy.flat = None
            self._store_staged(copy, *queued, completion)

    def _store_staged(
        self, copy: _Copy, piece: _Piece, buffer: _Buffer, event: Event, completion: DiskCompletion
    ) -> None:
        copy.backend.synchronize_event(event)
        view = copy.backend.host_view(buffer.flat)[: piece.nbytes]
        self._store(copy.extent, piece, view, None, completion)

    def _store(
        self, extent: _DiskExtent, piece: _Piece, view: memoryview, kept: memoryview | None, completion: DiskCompletion
    ) -> None:
        """Write a piece; if that fails, keep its bytes: ``kept``, or a copy of a buffer that others need."""
        phase = self._file.phase_of(view)
        extent.phases[piece.start] = phase
        try:
            self._file.write_at(piece.offset, view, phase)
        except DiskTierError as error:
            if kept is None:
                kept = memoryview(bytearray(piece.nbytes))
                copy_bytes(kept, view)
            extent.kept[piece.start] = kept
            self.failure = self.failure or again(error)
            completion.set_failure(error)
        self._workers.progressed()

    def _run_read(self, copy: _Copy, completion: DiskCompletion) -> None:
        try:
            if copy.backend.is_host_memory:
                copy.backend.synchronize_event(copy.ready)
                view = copy.backend.host_view(copy.flat)
                for piece in copy.extent.pieces(PIECE_BYTES):
                    self._fetch(copy.extent, piece, view[piece.start : piece.start + piece.nbytes])
                completion.finish()
            else:
                completion.finish(self._read_staged(copy))
        finally:
            with self._lock:
                copy.extent.num_jobs -= 1
                self._close_after_last_job()

    def _close_after_last_job(self) -> None:
        if self._closed:
            self._drain()

    def _read_staged(self, copy: _Copy) -> Event:
        backend = copy.backend
        with self._staging[type(backend), backend.name].pair() as buffers:
            for number, piece in enumerate(copy.extent.pieces(STAGING_BYTES)):
                buffer = buffers[number % 2]
                buffer.wait_until_idle(backend)
                self._fetch(copy.extent, piece, backend.host_view(buffer.flat)[: piece.nbytes])
                part = copy.flat[piece.start : piece.start + piece.nbytes]
                backend.copy(part, buffer.flat[: piece.nbytes], copy.stream)
                buffer.busy_until = backend.record_event(copy.stream)
            return buffer.busy_until

    def _fetch(self, extent: _DiskExtent, piece: _Piece, view: memoryview) -> None:
        kept = extent.kept.get(piece.start)
        if kept is not None:
            copy_bytes(view, kept)
        elif piece.start in extent.phases:
            self._file.read_at(piece.offset, view, extent.phases[piece.start])
        else:
            raise DiskTierError(
                f"disk tier: cannot read {piece.nbytes} bytes of {self._file.path}; because their "
                "write did not reach them; the completion of that write raises the reason"
            )
        self._workers.progressed()


class _State(enum.Enum):
    EMPTY = "empty"  # space, and no bytes in it
    WRITING = "writing"  # a job will write, or writes; readers queue behind it
    WRITTEN = "written"  # every piece is in the file, or kept in memory because the file refused it


class _Piece(NamedTuple):
    """Some bytes that one call moves: from ``start`` in the lease, at ``offset`` in the file."""

    start: int
    offset: int
    nbytes: int


class _DiskExtent:
    """Where the bytes of a lease are. ``state``, ``num_jobs`` and ``waiting`` belong to the tier's lock."""

    __slots__ = ("_nbytes", "is_released", "kept", "num_jobs", "phases", "ranges", "residue_bytes", "state", "waiting")

    def __init__(self, ranges: tuple[SlabRange, ...], nbytes: int) -> None:
        self.ranges = ranges
        self._nbytes = nbytes
        self.state = _State.EMPTY
        self.num_jobs = 0
        self.waiting: list[Job] = []
        self.is_released = False
        self.residue_bytes: int | None = None  # of a source in host memory, once a worker saw it
        self.phases: dict[int, int] = {}  # by a piece's start; see disk_file.py
        self.kept: dict[int, memoryview] = {}  # by a piece's start: bytes that the file refused

    def pieces(self, most_bytes: int) -> Iterator[_Piece]:
        """The lease, cut where its ranges end and into pieces of at most ``most_bytes``."""
        start = 0
        for part in self.ranges:
            end = min(start + part.nbytes, self._nbytes)
            for at in range(start, end, most_bytes):
                yield _Piece(at, part.start + at - start, min(most_bytes, end - at))
            start = end


@dataclasses.dataclass(slots=True)
class _Copy:
    """What one call of ``write`` or ``read`` was given; ``flat`` is the source or the target until it is let go."""

    extent: _DiskExtent
    flat: FlatBytes
    backend: DeviceBackend
    stream: Stream
    ready: Event


class _Buffer:
    """A pinned buffer, and the copy that still reads from it."""

    __slots__ = ("busy_until", "flat")

    def __init__(self, flat: FlatBytes) -> None:
        self.flat = flat
        self.busy_until: Event | None = None

    def wait_until_idle(self, backend: DeviceBackend) -> None:
        if self.busy_until is not None:
            backend.synchronize_event(self.busy_until)
            self.busy_until = None


class _StagingPool:
    """A pair of pinned buffers for each worker, so that taking one never waits."""

    def __init__(self, backend: DeviceBackend, num_pairs: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pairs: queue.SimpleQueue[tuple[_Buffer, _Buffer]] = queue.SimpleQueue()
        for _ in range(num_pairs):
            flat = backend.allocate_host(nbytes // num_pairs, pinned=True)
            # Any buffer may read what any other wrote, so all begin at a block's first address (see disk_file.py).
            start = -residue_of(backend.host_view(flat)) % BLOCK_BYTES
            first, second = start, start + STAGING_BYTES
            self._pairs.put((_Buffer(flat[first:second]), _Buffer(flat[second : second + STAGING_BYTES])))

    @contextlib.contextmanager
    def pair(self) -> Iterator[tuple[_Buffer, _Buffer]]:
        pair = self._pairs.get()
        try:
            yield pair
        finally:
            self._pairs.put(pair)
