"""The slabs of host memory of one device in one tier, and what may be taken of them in all.

A :class:`Pool` lends exact sizes. Space that was released waits for a lease of the same size, with the copy that may still use
it. ``host.py`` says when space is lent, written and released, and why it may be lent while a copy is queued.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Final

from hyper_parallel.core.activation_checkpoint.adapter import (
    Completion,
    DeviceBackend,
    FlatBytes,
    Stream,
    StreamCompletion,
)
from hyper_parallel.core.activation_checkpoint.far.arena import Arena, SlabRange

__all__ = ["HostBudget", "HostExtent", "Pool"]

GRANULE_BYTES: Final = 512
PAGE_BYTES: Final = 4096
SLAB_BYTES: Final = 64 * 2**20  # small requests grow the pool by about this much at once, where the slack allows it
_MOST_SIZES: Final = 1024
SLACK_DIVISOR: Final = 32  # a pool may hold 1/32 more than its live peak: below the promised 5 %


class HostBudget:
    """The most host memory that some tiers may hold together, and the lock that makes it exact.

    ``count_sharers``: how many processes of this host share ``limit_bytes`` now; None: they are this process's alone.
    """

    def __init__(self, limit_bytes: int, *, count_sharers: Callable[[], int] | None = None) -> None:
        self._whole_bytes = limit_bytes
        self._count_sharers = count_sharers
        self._sharers = 1 if count_sharers is None else max(1, count_sharers())
        self.held_bytes = 0
        self.lock = threading.Lock()
        self.pools: list[Pool] = []

    @property
    def limit_bytes(self) -> int:
        """The share of this process."""
        return self._whole_bytes // self._sharers

    def look_for_sharers(self) -> None:
        """Before more is taken: the ranks of this host may have found one another meanwhile."""
        if self._count_sharers is not None:
            self._sharers = max(1, self._count_sharers())

    @property
    def left_bytes(self) -> int:
        """What may still be taken. The caller holds the lock."""
        return self.limit_bytes - self.held_bytes

    def charge(self, nbytes: int) -> bool:
        """Count host memory that is taken beside the pools, or answer that the cap forbids it."""
        with self.lock:
            self.look_for_sharers()
            self.reclaim(nbytes, keep=None)
            if nbytes > self.left_bytes:
                return False
            self.held_bytes += nbytes
            return True

    def refund(self, nbytes: int) -> None:
        """Host memory that was charged is gone again."""
        with self.lock:
            self.held_bytes -= nbytes

    def reclaim(self, nbytes: int, *, keep: Pool | None) -> None:
        """Give idle slabs of all pools but ``keep`` back until ``nbytes`` fit. The caller holds the lock."""
        for pool in self.pools:
            if pool is not keep and nbytes > self.left_bytes:
                pool.drop_idle_slabs(nbytes - self.left_bytes)


class _AllOf:
    """The moment after which several copies have ended."""

    def __init__(self, copies: tuple[Completion, ...]) -> None:
        self._copies = copies

    def is_done(self) -> bool:
        return all(copy.is_done() for copy in self._copies)

    def is_ordered_before(self, stream: Stream) -> bool:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.Completion`."""
        return False

    def order(self, stream: Stream) -> None:
        for copy in self._copies:
            copy.order(stream)

    def wait(self) -> None:
        for copy in self._copies:
            copy.wait()


class HostExtent:
    """Where the bytes of a lease are, and what has to happen before they are written or read.

    When the lease is over the extent is released space, until the pool lends it again. ``after`` is the copy that may still
    use it then; None when there is none.
    """

    __slots__ = (
        "after",
        "backend",
        "free_after",
        "host",
        "hosts",
        "lease_bytes",
        "nbytes",
        "pool",
        "ranges",
        "written",
    )

    def __init__(
        self,
        pool: Pool,
        backend: DeviceBackend,
        nbytes: int,
        ranges: tuple[SlabRange, ...],
        free_after: tuple[Completion, ...],
    ) -> None:
        self.pool = pool
        self.backend = backend
        self.free_after = free_after
        self.written: StreamCompletion | None = None
        self.after: Completion | None = None
        self.place(ranges, nbytes)

    def place(self, ranges: tuple[SlabRange, ...], nbytes: int) -> None:
        """The first ``nbytes`` of these ranges are the lease's."""
        self.ranges = ranges
        self.nbytes = sum([part.nbytes for part in ranges])
        self.lease_bytes = nbytes
        # The slices keep the slab alive, so that a lease outlives its tier.
        self.hosts: list[FlatBytes] = self.pool.slices(ranges, nbytes)
        self.host = self.hosts[0] if len(self.hosts) == 1 else None  # all of it, where it lies in one piece

    def parts(self, device: FlatBytes) -> Sequence[tuple[FlatBytes, FlatBytes]]:
        """Each piece of host memory beside the part of the device's bytes that belongs there."""
        if self.host is not None:
            return ((self.host, device),)
        found: list[tuple[FlatBytes, FlatBytes]] = []
        at = 0
        for host, part in zip(self.hosts, self.ranges):
            end = min(at + part.nbytes, self.lease_bytes)
            found.append((host, device[at:end]))
            at = end
        return found


class Pool:
    """The slabs of one device in one tier. Every call is made with the budget's lock held.

    Space that was released waits for a lease of the same size: in a steady step there is one, and it costs no search. It
    goes back to the arena when a lease of another size needs it.
    """

    def __init__(self, budget: HostBudget) -> None:
        self.arena = Arena(GRANULE_BYTES)
        self.slabs: dict[int, FlatBytes] = {}
        self.in_flight_bytes = 0
        self._in_flight: collections.OrderedDict[HostExtent, None] = collections.OrderedDict()  # oldest first
        self._in_flight_of_size: dict[int, collections.OrderedDict[HostExtent, None]] = {}
        self._idle: dict[int, list[HostExtent]] = {}  # by size; no copy uses them
        self._budget = budget
        self.used_bytes = 0  # lent and not released, in granules
        self._peak_used_bytes = 0

    @property
    def in_flight(self) -> list[HostExtent]:
        """What was released while its last copy may still be queued, oldest first."""
        return list(self._in_flight)

    def oldest_copy(self) -> Completion | None:
        """The copy to wait for where nothing else frees space."""
        return next((space.after for space in self._in_flight), None)

    def lend(self, backend: DeviceBackend, nbytes: int) -> HostExtent | None:
        """From what is free, else from what streams of this device will have freed by then; None: grow or wait."""
        wanted = -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
        extent = self._lend_released(backend, nbytes, wanted)
        if extent is None:
            ranges, after = self._find(backend, nbytes)
            if ranges is None:
                return None
            extent = HostExtent(self, backend, nbytes, ranges, after)
        self.used_bytes += wanted
        if self.used_bytes > self._peak_used_bytes:
            self._peak_used_bytes = self.used_bytes
        return extent

    def _lend_released(self, backend: DeviceBackend, nbytes: int, wanted_bytes: int) -> HostExtent | None:
        """Space that a lease of the same size has released: without a copy, else behind its copy if nothing is free."""
        idle = self._idle.get(wanted_bytes)
        after: tuple[Completion, ...] = ()
        if idle:
            extent = idle.pop()
        else:
            same = self._in_flight_of_size.get(wanted_bytes)
            if not same:
                return None
            for extent in same:  # noqa: B007  # the oldest; next(iter()) is two calls
                break
            copy = extent.after
            if copy is not None and not copy.is_done():
                if wanted_bytes <= self.arena.free_bytes or not self._is_orderable(extent, backend):
                    return None
                after = (copy,)
            self._remove(extent)
        extent.backend = backend
        extent.free_after = after
        extent.after = None
        if extent.lease_bytes != nbytes:
            extent.place(extent.ranges, nbytes)
        return extent

    def _find(self, backend: DeviceBackend, nbytes: int) -> tuple[tuple[SlabRange, ...] | None, tuple[Completion, ...]]:
        """The same for a lease whose size no released space has."""
        self._give_idle()
        while self._in_flight and self._is_done(space := next(iter(self._in_flight))):
            self._collect(space)
        ranges, after = self._take(backend, nbytes)
        if ranges is None and self._in_flight:
            self.collect_all()
            ranges, after = self._take(backend, nbytes)
        return ranges, after

    def _take(self, backend: DeviceBackend, nbytes: int) -> tuple[tuple[SlabRange, ...] | None, tuple[Completion, ...]]:
        """Free space alone, else with space under copies of this device; None exactly where both together are too few."""
        ranges = self.arena.take(nbytes)
        return (ranges, ()) if ranges is not None else self._borrow(backend, self.arena.round_up(nbytes))

    def slices(self, ranges: tuple[SlabRange, ...], nbytes: int) -> list[FlatBytes]:
        """The first ``nbytes`` of these ranges."""
        hosts: list[FlatBytes] = []
        for part in ranges:
            hosts.append(self.slabs[part.slab][part.start : part.start + min(part.nbytes, nbytes)])
            nbytes -= part.nbytes
        return hosts

    def take_back(self, extent: HostExtent, after: Completion | None) -> None:
        """The lease is over; its space is free once its last copy is."""
        last, nbytes = extent.written if after is None else after, extent.nbytes
        if last is None and extent.free_after:
            # Space that was borrowed and never written is still under the copies it was borrowed from.
            copies = extent.free_after
            last = copies[0] if len(copies) == 1 else _AllOf(copies)
        extent.after, extent.free_after, extent.written = last, (), None
        if last is None:
            self._idle.setdefault(nbytes, []).append(extent)
        else:
            self._in_flight[extent] = None
            same = self._in_flight_of_size.get(nbytes)
            if same is None:
                same = self._new_size(nbytes)
            same[extent] = None
            self.in_flight_bytes += nbytes
        self.used_bytes -= nbytes

    def _give_idle(self) -> None:
        """Return all space without a copy to the arena."""
        idle, self._idle = self._idle, {}
        for spaces in idle.values():
            for space in spaces:
                self.arena.give(space.ranges)

    def collect_all(self) -> None:
        """Free all space whose copies are done, in whatever order they ended."""
        self._give_idle()
        for space in self.in_flight:
            if self._is_done(space):
                self._collect(space)

    def growth_bytes(self, backend: DeviceBackend, wanted_bytes: int) -> tuple[int, int]:
        """What to ask the host for: preferably this much, at least that much."""
        needed = wanted_bytes - self.arena.free_bytes - sum(space.nbytes for space in self._orderable(backend))
        assert needed > 0, "the pool is asked to grow only after it could not lend"
        peak = max(self._peak_used_bytes, self.used_bytes + wanted_bytes)
        slack = peak + peak // SLACK_DIVISOR - self.arena.held_bytes
        preferred = wanted_bytes if wanted_bytes <= slack else needed
        several = min(SLAB_BYTES, slack)
        if several >= 2 * preferred:
            preferred = several // PAGE_BYTES * PAGE_BYTES
        return max(_pages(preferred), _pages(needed)), _pages(needed)

    def add_slab(self, slab: FlatBytes, nbytes: int) -> None:
        """The host gave ``nbytes`` more."""
        self.slabs[self.arena.add_slab(nbytes)] = slab
        self._budget.held_bytes += nbytes

    def drop_idle_slabs(self, nbytes: int) -> None:
        """Give idle slabs back to the host until ``nbytes`` of them are gone, or none is left."""
        if nbytes > 0:
            self.collect_all()
        for slab in self.arena.idle_slabs():
            if nbytes <= 0:
                return
            dropped = self.arena.remove_slab(slab)
            del self.slabs[slab]
            self._budget.held_bytes -= dropped
            nbytes -= dropped

    def _is_done(self, space: HostExtent) -> bool:
        return space.after is None or space.after.is_done()

    def _collect(self, space: HostExtent) -> None:
        """Return space under a copy to the arena."""
        self._remove(space)
        self.arena.give(space.ranges)

    def _remove(self, space: HostExtent) -> None:
        """Space under a copy is lent again, or free."""
        del self._in_flight[space]
        del self._in_flight_of_size[space.nbytes][space]
        self.in_flight_bytes -= space.nbytes

    def _new_size(self, nbytes: int) -> collections.OrderedDict[HostExtent, None]:
        """Where the spaces of a size are kept while they are under a copy. Sizes that are gone are forgotten now and then."""
        if len(self._in_flight_of_size) > _MOST_SIZES:
            self._in_flight_of_size = {size: some for size, some in self._in_flight_of_size.items() if some}
        same = self._in_flight_of_size[nbytes] = collections.OrderedDict()
        return same

    def _borrow(
        self, backend: DeviceBackend, wanted_bytes: int
    ) -> tuple[tuple[SlabRange, ...] | None, tuple[Completion, ...]]:
        """Space that is still under a copy, with the copies to order the next one after; the oldest first."""
        usable = self._enough_orderable(backend, wanted_bytes - self.arena.free_bytes)
        if usable is None:
            return None, ()
        ranges: list[SlabRange] = []
        after: list[Completion] = []
        left = wanted_bytes
        for space in usable:
            if not left:
                break
            taken, rest = self._cut(space.ranges, left)
            ranges.extend(taken)
            assert space.after is not None, "space in flight has a copy"
            after.append(space.after)
            left -= sum(part.nbytes for part in taken)
            self._remove(space)
            if rest:
                self._keep_rest(space, rest)
        if left:
            ranges.extend(self.arena.take(left) or ())
        return tuple(ranges), tuple(after)

    def _keep_rest(self, space: HostExtent, rest: tuple[SlabRange, ...]) -> None:
        """A part of the space was lent; the rest stays under its copy, and stays the oldest."""
        space.place(rest, sum([part.nbytes for part in rest]))
        same = self._in_flight_of_size.get(space.nbytes)
        for spaces in (self._in_flight, self._new_size(space.nbytes) if same is None else same):
            spaces[space] = None
            spaces.move_to_end(space, last=False)
        self.in_flight_bytes += space.nbytes

    def _enough_orderable(self, backend: DeviceBackend, wanted_bytes: int) -> list[HostExtent] | None:
        """The oldest orderable spaces that have ``wanted_bytes`` together, at least one; None where all are too few."""
        if wanted_bytes > self.in_flight_bytes:
            return None
        found: list[HostExtent] = []
        for space in self._in_flight:
            if self._is_orderable(space, backend):
                found.append(space)
                wanted_bytes -= space.nbytes
                if wanted_bytes <= 0:
                    return found
        return None

    @staticmethod
    def _is_orderable(space: HostExtent, backend: DeviceBackend) -> bool:
        """Whether a stream of this device can be ordered after the space's copy without waiting."""
        return space.backend is backend and type(space.after) is StreamCompletion

    def _orderable(self, backend: DeviceBackend) -> list[HostExtent]:
        return [space for space in self._in_flight if self._is_orderable(space, backend)]

    def _cut(self, ranges: tuple[SlabRange, ...], nbytes: int) -> tuple[list[SlabRange], tuple[SlabRange, ...]]:
        taken: list[SlabRange] = []
        rest = list(ranges)
        while rest and nbytes:
            part = rest.pop(0)
            if part.nbytes > nbytes:
                part, remainder = self.arena.split(part, nbytes)
                rest.insert(0, remainder)
            taken.append(part)
            nbytes -= part.nbytes
        return taken, tuple(rest)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
