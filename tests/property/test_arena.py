"""Whatever is taken, given, cut, added and removed: spans never overlap, nothing is lost, nothing grows needlessly."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hyper_parallel.core.activation_checkpoint.far.arena import Arena, SlabRange

GRANULE = 8


class ArenaAgainstBytes(RuleBasedStateMachine):
    """The arena beside a model that marks every single granule."""

    @initialize(granules=st.integers(1, 40))
    def start(self, granules: int) -> None:
        self.arena = Arena(GRANULE)
        self.owner: dict[tuple[int, int], int | None] = {}  # (slab, granule) -> lease, or None when free
        self.slab_granules: dict[int, int] = {}
        self.leases: dict[int, tuple[SlabRange, ...]] = {}
        self.next_lease = 0
        self.add(granules)

    def granules(self, span: SlabRange) -> list[tuple[int, int]]:
        assert span.start % GRANULE == 0
        assert span.nbytes % GRANULE == 0
        assert span.nbytes > 0
        return [(span.slab, at) for at in range(span.start // GRANULE, span.end // GRANULE)]

    def largest_free_run(self) -> int:
        longest = 0
        for slab, granules in self.slab_granules.items():
            run = 0
            for at in range(granules):
                run = run + 1 if self.owner[slab, at] is None else 0
                longest = max(longest, run)
        return longest

    @rule(granules=st.integers(1, 40))
    def add(self, granules: int) -> None:
        slab = self.arena.add_slab(granules * GRANULE)
        assert slab not in self.slab_granules
        self.slab_granules[slab] = granules
        self.owner.update({(slab, at): None for at in range(granules)})

    @precondition(lambda self: self.slab_granules)
    @rule(data=st.data(), granules=st.integers(1, 20))
    def extend(self, data: st.DataObject, granules: int) -> None:
        slab = data.draw(st.sampled_from(sorted(self.slab_granules)))
        self.arena.extend_slab(slab, granules * GRANULE)
        old = self.slab_granules[slab]
        self.owner.update({(slab, at): None for at in range(old, old + granules)})
        self.slab_granules[slab] = old + granules

    @rule(nbytes=st.integers(1, 60 * GRANULE))
    def take(self, nbytes: int) -> None:
        free = sum(owner is None for owner in self.owner.values())
        longest = self.largest_free_run()
        wanted = -(-nbytes // GRANULE)
        spans = self.arena.take(nbytes)
        if spans is None:
            assert free < wanted
            return
        assert sum(span.nbytes for span in spans) == wanted * GRANULE
        assert (len(spans) == 1) == (longest >= wanted)
        for span in spans:
            for granule in self.granules(span):
                assert self.owner[granule] is None
                self.owner[granule] = self.next_lease
        self.leases[self.next_lease] = spans
        self.next_lease += 1

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        spans = self.leases.pop(lease)
        self.arena.give(spans)
        for span in spans:
            for granule in self.granules(span):
                self.owner[granule] = None
        with pytest.raises(ValueError, match="not lent, or given twice"):
            self.arena.give(spans)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        spans = self.leases[lease]
        span = spans[0]
        if span.nbytes == GRANULE:
            with pytest.raises(ValueError, match="cannot cut"):
                self.arena.split(span, GRANULE)
            return
        cut = data.draw(st.integers(1, span.nbytes // GRANULE - 1)) * GRANULE
        first, second = self.arena.split(span, cut)
        assert (first.nbytes, second.end) == (cut, span.end)
        self.leases[lease] = (first, second, *spans[1:])

    @rule()
    def remove_idle(self) -> None:
        idle = {
            slab
            for slab, granules in self.slab_granules.items()
            if all(self.owner[slab, at] is None for at in range(granules))
        }
        answered = self.arena.idle_slabs()
        assert set(answered) == idle
        for slab in answered[:1]:
            granules = self.slab_granules.pop(slab)
            assert self.arena.remove_slab(slab) == granules * GRANULE
            for at in range(granules):
                del self.owner[slab, at]
        for slab in set(self.slab_granules) - idle:
            with pytest.raises(ValueError, match="still lent in part"):
                self.arena.remove_slab(slab)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "arena"):
            return
        free = sum(owner is None for owner in self.owner.values())
        assert self.arena.held_bytes == len(self.owner) * GRANULE
        assert self.arena.free_bytes == free * GRANULE
        assert self.arena.lent_bytes == (len(self.owner) - free) * GRANULE


TestArenaAgainstBytes = ArenaAgainstBytes.TestCase
TestArenaAgainstBytes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_best_fit_keeps_the_large_span() -> None:
    arena = Arena(1)
    large, small = arena.add_slab(100), arena.add_slab(10)
    assert arena.take(10) == (SlabRange(small, 0, 10),)
    assert arena.take(100) == (SlabRange(large, 0, 100),)


def test_freed_neighbours_become_one_span() -> None:
    arena = Arena(1)
    slab = arena.add_slab(30)
    parts = [arena.take(10) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        assert part is not None
        arena.give(part)
    assert arena.take(30) == (SlabRange(slab, 0, 30),)


def test_scattered_room_is_used_before_growth() -> None:
    arena = Arena(1)
    slab = arena.add_slab(30)
    parts = [arena.take(10) for _ in range(3)]
    arena.give(parts[0])
    arena.give(parts[2])
    assert arena.take(21) is None
    assert set(arena.take(20)) == {SlabRange(slab, 0, 10), SlabRange(slab, 20, 10)}


@pytest.mark.parametrize("wrong", [0, -8, 12])
def test_a_slab_has_whole_granules(wrong: int) -> None:
    with pytest.raises(ValueError, match="positive multiple of 8 bytes"):
        Arena(8).add_slab(wrong)
    with pytest.raises(ValueError, match=r"Arena\.take: expected at least 1 byte"):
        Arena(8).take(0)
    with pytest.raises(ValueError, match=r"Arena\.granule_bytes: expected at least 1"):
        Arena(0)
