"""Host memory as far memory: slabs that are taken once, lent in exact sizes, and reused for the whole run.

:class:`HostTier` serves both ``pinned`` and ``pageable``: they differ in one argument of one allocation, and the copies
are the same calls. All host tiers of one :class:`HostBudget` share its hard cap and its lock.

Theory of operation
-------------------
*Growth.* Bytes are asked of the host only when the free bytes of the pool are fewer than wanted (scattered leases, see
``arena.py``). So what is held follows the peak of what was lent, within 1/32, whatever the shapes, and an identical
second step asks for nothing.

*Reuse.* The host runs far ahead of the device: at the start of a step's forward, most copies of the last backward are
only queued. Waiting for them would stall the host, taking fresh memory would double it. So a lease may be served from
space whose last copy is still queued on a stream of the same device; the lease carries that copy's completion, and its
``write`` orders its own stream after it before it touches a byte. Space under any other kind of completion is lent again
only once ``is_done()`` says so; it is waited for only where the cap forbids growth.

*Release.* ``release`` runs inside destructors: in any thread, at any point, also in the middle of ``reserve`` on the
same thread, with the lock held. It therefore takes no lock and changes nothing else: it appends to a ``deque``, which is
atomic, and the next ``reserve`` or ``statistics`` drains it under the lock.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Final

from hyper_parallel.core.activation_checkpoint.adapter import (
    Completion,
    DeviceBackend,
    Event,
    FlatBytes,
    Stream,
    StreamCompletion,
)
from hyper_parallel.core.activation_checkpoint.far.pool import HostBudget, HostExtent, Pool
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal, TierStatistics
from hyper_parallel.errors import FarMemoryError

__all__ = ["HostBudget", "HostTier"]

TIMED_BYTES: Final = 16 * 2**20  # smaller copies are timed now and then: an event costs as much as their launch
TIMED_EVERY: Final = 16


class HostTier:
    """Pinned or pageable host memory; see :class:`~hyper_parallel.core.activation_checkpoint.far.tier.Tier`."""

    def __init__(self, budget: HostBudget, *, pinned: bool) -> None:
        self.name = "pinned" if pinned else "pageable"
        self._pinned = pinned
        self._budget = budget
        # By kind and name of device: a slab is a tensor of one framework, and space is reused without asking another
        # device how far its streams are.
        self._pools: dict[tuple[type, str], Pool] = {}
        self._last: tuple[DeviceBackend, Pool] | None = None  # of the last lease
        self._released: collections.deque[tuple[Lease, Completion | None]] = collections.deque()
        self._closed = False
        self._live_bytes = self._peak_live_bytes = self._peak_held_bytes = 0
        self._allocations = self._refusals = 0
        self._written_bytes = self._read_bytes = 0
        self._small_copies = 0

    def reserve(self, backend: DeviceBackend, nbytes: int) -> Lease | Refusal:
        """Space for ``nbytes``, or why there is none. Waits only where the cap is reached and copies will free space."""
        if nbytes < 1:
            raise ValueError(f"HostTier.reserve: expected at least 1 byte, got {nbytes}")
        while True:
            with self._budget.lock:
                if self._released:
                    self._drain()
                answer = self._try_reserve(backend, nbytes)
            if isinstance(answer, (Lease, Refusal)):  # a union would be made at every call
                return answer
            with contextlib.suppress(Exception):  # a copy that failed has ended too, and its owner was told
                answer.wait()

    def reserve_together(self, backend: DeviceBackend, sizes: Sequence[int]) -> list[Lease]:
        """Space for the first of these sizes, as many as the pool has without growing; :meth:`reserve` serves the others."""
        with self._budget.lock:
            if self._closed:
                return []
            if self._released:
                self._drain()
            pool = self._pool_for(backend)
            leases: list[Lease] = []
            for nbytes in sizes:
                extent = pool.lend(backend, nbytes)
                if extent is None:
                    break
                leases.append(Lease(self, nbytes, extent))
            self._count_lent(sum(sizes[: len(leases)]))
        return leases

    def write(
        self, lease: Lease, source: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copy out, after ``ready`` and after the last copy that used the same space."""
        return self.write_together([(lease, source)], backend=backend, stream=stream, ready=ready)

    def read(
        self, lease: Lease, target: FlatBytes, *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copy back, after ``ready`` and after the copy out."""
        return self.read_together([(lease, target)], backend=backend, stream=stream, ready=ready)

    def write_together(
        self, pieces: Sequence[tuple[Lease, FlatBytes]], *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copies out of several sources. One event ends them all; each piece has its own space."""
        backend.wait_event(stream, ready)
        nbytes = 0
        copies: list[tuple[FlatBytes, FlatBytes]] = []
        for lease, source in pieces:
            extent: HostExtent = lease.extent
            nbytes += lease.nbytes
            if extent.host is not None:
                copies.append((extent.host, source))
            else:
                copies += extent.parts(source)
            for completion in extent.free_after:
                completion.order(stream)
        start = self._start(backend, stream, nbytes)
        backend.copy_all(copies, stream)
        written = StreamCompletion(backend, start, backend.record_event(stream, timing=True))
        for lease, _ in pieces:
            lease.extent.written = written
            lease.extent.free_after = ()
        with self._budget.lock:
            self._written_bytes += nbytes
        return written

    def read_together(
        self, pieces: Sequence[tuple[Lease, FlatBytes]], *, backend: DeviceBackend, stream: Stream, ready: Event
    ) -> Completion:
        """Queue the copies back into several targets. One event ends them all."""
        nbytes = 0
        for lease, _ in pieces:
            nbytes += lease.nbytes
            if lease.extent.written is None:
                raise FarMemoryError(
                    f"{self.name}: cannot read a lease of {lease.nbytes} bytes; because nothing was written to it"
                )
        backend.wait_event(stream, ready)
        copies: list[tuple[FlatBytes, FlatBytes]] = []
        ordered: Completion | None = None
        for lease, target in pieces:
            extent: HostExtent = lease.extent
            if extent.written is not ordered:  # a batch that was written together is often read together
                ordered = extent.written
                assert ordered is not None, "looked at above"
                ordered.order(stream)
            if extent.host is not None:
                copies.append((target, extent.host))
            else:
                copies += [(part, host) for host, part in extent.parts(target)]
        start = self._start(backend, stream, nbytes)
        backend.copy_all(copies, stream)
        end = backend.record_event(stream, timing=True)
        with self._budget.lock:
            self._read_bytes += nbytes
        return StreamCompletion(backend, start, end)

    def _start(self, backend: DeviceBackend, stream: Stream, nbytes: int) -> Event | None:
        if nbytes < TIMED_BYTES:
            self._small_copies += 1
            if self._small_copies % TIMED_EVERY != 1:
                return None
        return backend.record_event(stream, timing=True)

    def release(self, lease: Lease, after: Completion | None) -> None:
        """Take the space back once ``after`` is done. Only appends to a deque; see the note *Release* above."""
        self._released.append((lease, after))
        if self._closed:  # no later reserve will drain it
            self._drain_if_free()

    def host_bytes(self, lease: Lease) -> FlatBytes | None:
        """The bytes of a lease that lies in one piece."""
        extent: HostExtent = lease.extent
        return extent.host

    def statistics(self) -> TierStatistics:
        """What it holds and has done so far."""
        with self._budget.lock:
            self._drain()
            return TierStatistics(
                name=self.name,
                live_bytes=self._live_bytes,
                peak_live_bytes=self._peak_live_bytes,
                held_bytes=sum(pool.arena.held_bytes for pool in self._pools.values()),
                peak_held_bytes=self._peak_held_bytes,
                allocations=self._allocations,
                written_bytes=self._written_bytes,
                read_bytes=self._read_bytes,
                refusals=self._refusals,
                limit_bytes=self._budget.limit_bytes,
            )

    def close(self) -> None:
        """Give all slabs back that are not lent; the others follow when their leases are released."""
        with self._budget.lock:
            self._closed = True
            self._drain()
            in_flight = [space.after for pool in self._pools.values() for space in pool.in_flight]
        for completion in in_flight:
            assert completion is not None, "space in flight has a copy"
            with contextlib.suppress(Exception):  # its owner was told
                completion.wait()
        with self._budget.lock:
            self._drain()

    def retire(self) -> None:
        """Called when nothing will reserve any more. Give back, without a wait, what is not lent and not under a copy."""
        self._closed = True
        self._drain_if_free()

    def _drain_if_free(self) -> None:
        """Safe in destructors, also of a thread that holds the lock."""
        if self._budget.lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._budget.lock.release()

    def _drain(self) -> None:
        while self._released:
            lease, after = self._released.popleft()
            extent: HostExtent = lease.extent
            self._live_bytes -= lease.nbytes
            lease.extent = None  # the pool lends the extent again, to another lease
            extent.pool.take_back(extent, after)
        if self._closed:
            for pool in self._pools.values():
                pool.collect_all()
                pool.drop_idle_slabs(pool.arena.held_bytes)

    def _try_reserve(self, backend: DeviceBackend, nbytes: int) -> Lease | Refusal | Completion:
        if self._closed:
            raise FarMemoryError(
                f"{self.name}: cannot lend {nbytes} bytes; because this tier was closed; build a new one"
            )
        pool = self._pool_for(backend)
        refusal: Refusal | None = None
        extent = pool.lend(backend, nbytes)
        if extent is None:
            refusal = self._grow(pool, backend, pool.arena.round_up(nbytes))
            extent = pool.lend(backend, nbytes) if refusal is None else None
        if extent is not None:
            self._count_lent(nbytes)
            return Lease(self, nbytes, extent)
        assert refusal is not None
        if pool.arena.free_bytes + pool.in_flight_bytes >= nbytes and (oldest := pool.oldest_copy()) is not None:
            return oldest
        self._refusals += 1
        return refusal

    def _count_lent(self, nbytes: int) -> None:
        self._live_bytes += nbytes
        if self._live_bytes > self._peak_live_bytes:
            self._peak_live_bytes = self._live_bytes

    def _pool_for(self, backend: DeviceBackend) -> Pool:
        if self._last is not None and self._last[0] is backend:
            return self._last[1]
        key = (type(backend), backend.name)
        if key not in self._pools:
            pool = Pool(self._budget)
            self._pools[key] = pool
            self._budget.pools.append(pool)
        self._last = backend, self._pools[key]
        return self._pools[key]

    def _grow(self, pool: Pool, backend: DeviceBackend, wanted_bytes: int) -> Refusal | None:
        self._budget.look_for_sharers()
        preferred, needed = pool.growth_bytes(backend, wanted_bytes)
        self._budget.reclaim(preferred, keep=pool)
        if needed > self._budget.left_bytes:
            return Refusal.OVER_LIMIT
        for nbytes in sorted({preferred, needed}, reverse=True):
            if nbytes > self._budget.left_bytes:
                continue
            try:
                slab = backend.allocate_host(nbytes, pinned=self._pinned)
            except MemoryError:
                self._budget.reclaim(self._budget.limit_bytes, keep=pool)
                continue
            pool.add_slab(slab, nbytes)
            self._allocations += 1
            held = sum(pool.arena.held_bytes for pool in self._pools.values())
            self._peak_held_bytes = max(self._peak_held_bytes, held)
            return None
        return Refusal.NO_SPACE
