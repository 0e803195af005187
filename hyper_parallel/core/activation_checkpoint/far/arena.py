"""Which ranges of which slabs are lent, and which are free.

This module is arithmetic only. It knows no device, no file, no thread: the owner of an :class:`Arena` holds its own lock
around every call.

Why leases may be scattered
---------------------------
A range allocator that insists on contiguous space fragments under changing shapes, and must then grow although enough
bytes are free. Here a request that fits no single free range is served by several. So an arena has to grow only when
the free bytes are fewer than those asked for, whatever the order of sizes: held bytes never exceed the peak of lent
bytes by more than what the owner chose to add. One contiguous range is always preferred, the fewest ranges come second.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

__all__ = ["Arena", "SlabRange"]


class SlabRange(NamedTuple):
    """``nbytes`` of one slab, from ``start`` on."""

    slab: int
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.start + self.nbytes


class Arena:
    """Lends ranges of slabs: best fit, coalescing, scattered where no single range is large enough.

    ``granule_bytes``: every range starts and ends at a multiple of it (the end of a slab may be one too).
    """

    def __init__(self, granule_bytes: int) -> None:
        if granule_bytes < 1:
            raise ValueError(f"Arena.granule_bytes: expected at least 1, got {granule_bytes}")
        self.granule_bytes = granule_bytes
        self.held_bytes = 0
        self.free_bytes = 0
        self._slab_bytes: dict[int, int] = {}
        self._next_slab = 0
        self._lent: set[SlabRange] = set()
        self._free_by_size: list[tuple[int, int, int]] = []  # (nbytes, slab, start), ascending
        self._free_at_start: dict[tuple[int, int], int] = {}  # (slab, start) -> nbytes
        self._free_at_end: dict[tuple[int, int], int] = {}  # (slab, end) -> start

    @property
    def lent_bytes(self) -> int:
        """What is lent now, in whole granules."""
        return self.held_bytes - self.free_bytes

    def round_up(self, nbytes: int) -> int:
        """``nbytes`` in whole granules."""
        return -(-nbytes // self.granule_bytes) * self.granule_bytes

    def add_slab(self, nbytes: int) -> int:
        """Add a new slab of ``nbytes``; the answer is its number in every range."""
        self._check_granular(nbytes)
        slab = self._next_slab
        self._next_slab += 1
        self._slab_bytes[slab] = nbytes
        self.held_bytes += nbytes
        self._free(slab, 0, nbytes)
        return slab

    def extend_slab(self, slab: int, nbytes: int) -> None:
        """The slab became longer by ``nbytes``."""
        self._check_granular(nbytes)
        start = self._slab_bytes[slab]
        self._slab_bytes[slab] = start + nbytes
        self.held_bytes += nbytes
        self._free(slab, start, nbytes)

    def remove_slab(self, slab: int) -> int:
        """Forget an idle slab; the answer is its size."""
        nbytes = self._slab_bytes[slab]
        if self._free_at_start.get((slab, 0)) != nbytes:
            raise ValueError(f"Arena.remove_slab: slab {slab} is still lent in part; give its ranges back first")
        self._forget_free(slab, 0, nbytes)
        del self._slab_bytes[slab]
        self.held_bytes -= nbytes
        return nbytes

    def idle_slabs(self) -> list[int]:
        """The slabs of which nothing is lent, smallest first."""
        idle = [slab for slab, nbytes in self._slab_bytes.items() if self._free_at_start.get((slab, 0)) == nbytes]
        return sorted(idle, key=self._slab_bytes.__getitem__)

    def take(self, nbytes: int) -> tuple[SlabRange, ...] | None:
        """Lend ``nbytes`` in whole granules: one range if any is large enough, else the fewest; None: too few free."""
        wanted = self.round_up(nbytes)
        if wanted < 1:
            raise ValueError(f"Arena.take: expected at least 1 byte, got {nbytes}")
        if wanted > self.free_bytes:
            return None
        ranges: list[SlabRange] = []
        while wanted:
            # The smallest range that holds the rest, else the largest there is: large ranges survive, pieces are few.
            at = min(bisect.bisect_left(self._free_by_size, (wanted, -1, -1)), len(self._free_by_size) - 1)
            size, slab, start = self._free_by_size[at]
            taken = min(size, wanted)
            self._forget_free(slab, start, size)
            if taken < size:
                self._remember_free(slab, start + taken, size - taken)
            ranges.append(SlabRange(slab, start, taken))
            wanted -= taken
        self._lent.update(ranges)
        return tuple(ranges)

    def give(self, ranges: tuple[SlabRange, ...]) -> None:
        """Take lent ranges back. A range that is not lent is an error, and then nothing changes."""
        if len(set(ranges)) != len(ranges) or not self._lent.issuperset(ranges):
            unknown = [lent for lent in ranges if lent not in self._lent]
            raise ValueError(f"Arena.give: not lent, or given twice: {unknown or ranges}")
        self._lent.difference_update(ranges)
        for lent in ranges:
            self._free(lent.slab, lent.start, lent.nbytes)

    def split(self, lent: SlabRange, nbytes: int) -> tuple[SlabRange, SlabRange]:
        """Cut a lent range in two that are lent; the first has ``nbytes``."""
        if lent not in self._lent or not 0 < nbytes < lent.nbytes or nbytes % self.granule_bytes:
            raise ValueError(f"Arena.split: cannot cut {nbytes} bytes off {lent}; it must be lent and longer")
        first = SlabRange(lent.slab, lent.start, nbytes)
        second = SlabRange(lent.slab, lent.start + nbytes, lent.nbytes - nbytes)
        self._lent.remove(lent)
        self._lent.update((first, second))
        return first, second

    def _check_granular(self, nbytes: int) -> None:
        if nbytes < 1 or nbytes % self.granule_bytes:
            raise ValueError(f"Arena: a slab has a positive multiple of {self.granule_bytes} bytes, got {nbytes}")

    def _free(self, slab: int, start: int, nbytes: int) -> None:
        before = self._free_at_end.get((slab, start))
        if before is not None:
            self._forget_free(slab, before, start - before)
            nbytes += start - before
            start = before
        after = self._free_at_start.get((slab, start + nbytes))
        if after is not None:
            self._forget_free(slab, start + nbytes, after)
            nbytes += after
        self._remember_free(slab, start, nbytes)

    def _remember_free(self, slab: int, start: int, nbytes: int) -> None:
        bisect.insort(self._free_by_size, (nbytes, slab, start))
        self._free_at_start[slab, start] = nbytes
        self._free_at_end[slab, start + nbytes] = start
        self.free_bytes += nbytes

    def _forget_free(self, slab: int, start: int, nbytes: int) -> None:
        del self._free_by_size[bisect.bisect_left(self._free_by_size, (nbytes, slab, start))]
        del self._free_at_start[slab, start]
        del self._free_at_end[slab, start + nbytes]
        self.free_bytes -= nbytes
