"""The arena's books: which span is lent, in which order spans are chosen, what is refused."""

from __future__ import annotations

import pytest

from hyper_parallel.core.activation_checkpoint.far.arena import Arena, SlabRange


def arena(*slabs: int) -> Arena:
    made = Arena(4)
    for nbytes in slabs:
        made.add_slab(nbytes)
    return made


def taken(made: Arena, nbytes: int) -> tuple[SlabRange, ...]:
    spans = made.take(nbytes)
    assert spans is not None
    return spans


def test_requests_are_whole_granules_from_the_start_of_a_slab() -> None:
    made = arena(16)
    assert taken(made, 1) == (SlabRange(0, 0, 4),)
    assert taken(made, 5) == (SlabRange(0, 4, 8),)
    assert (made.held_bytes, made.lent_bytes, made.free_bytes) == (16, 12, 4)


def test_the_smallest_span_that_is_large_enough_is_taken() -> None:
    assert taken(arena(32, 8, 16), 8) == (SlabRange(1, 0, 8),)
    assert taken(arena(32, 8, 16), 12) == (SlabRange(2, 0, 12),)


def test_a_request_that_fits_no_span_is_served_by_the_largest_ones() -> None:
    made = arena(8, 16, 12)
    assert taken(made, 24) == (SlabRange(1, 0, 16), SlabRange(0, 0, 8))
    assert made.take(16) is None
    assert taken(made, 12) == (SlabRange(2, 0, 12),)


def test_neighbours_that_come_back_become_one_span() -> None:
    made = arena(24)
    first, second, third = (taken(made, 8) for _ in range(3))
    for spans in (first, third, second):
        made.give(spans)
    assert taken(made, 24) == (SlabRange(0, 0, 24),)


def test_a_span_that_is_not_lent_is_refused_and_nothing_changes() -> None:
    made = arena(16)
    spans = taken(made, 8)
    for wrong in ((SlabRange(0, 8, 8),), (*spans, *spans), (SlabRange(0, 0, 4),)):
        with pytest.raises(ValueError, match=r"Arena.give: not lent, or given twice"):
            made.give(wrong)
        assert (made.lent_bytes, made.free_bytes) == (8, 8)
    made.give(spans)
    with pytest.raises(ValueError, match=r"Arena.give: not lent, or given twice"):
        made.give(spans)


def test_a_lent_span_is_cut_in_two_that_come_back_apart() -> None:
    made = arena(16)
    (span,) = taken(made, 16)
    first, second = made.split(span, 4)
    assert (first, second) == (SlabRange(0, 0, 4), SlabRange(0, 4, 12))
    made.give((first,))
    assert (made.lent_bytes, made.free_bytes) == (12, 4)
    for wrong in (0, 2, 12, 16):
        with pytest.raises(ValueError, match=f"Arena.split: cannot cut {wrong} bytes off"):
            made.split(second, wrong)


def test_only_idle_slabs_are_named_and_removed() -> None:
    made = arena(16, 8, 32)
    spans = taken(made, 32)
    assert made.idle_slabs() == [1, 0]
    with pytest.raises(ValueError, match="slab 2 is still lent in part"):
        made.remove_slab(2)
    assert made.remove_slab(1) == 8
    made.give(spans)
    assert (made.idle_slabs(), made.held_bytes, made.free_bytes) == ([0, 2], 48, 48)
    assert made.add_slab(4) == 3, "a name is not used twice"


def test_a_slab_that_became_longer_is_one_span() -> None:
    made = arena(8)
    made.extend_slab(0, 8)
    assert taken(made, 16) == (SlabRange(0, 0, 16),)


@pytest.mark.parametrize("wrong", [0, -4, 3])
def test_sizes_that_are_no_granules_are_refused(wrong: int) -> None:
    made = arena(8)
    with pytest.raises(ValueError, match="a slab has a positive multiple of 4 bytes"):
        made.add_slab(wrong)
    with pytest.raises(ValueError, match="a slab has a positive multiple of 4 bytes"):
        made.extend_slab(0, wrong)
    if wrong <= 0:
        with pytest.raises(ValueError, match=r"Arena.take: expected at least 1 byte"):
            made.take(wrong)
    with pytest.raises(ValueError, match=r"Arena.granule_bytes: expected at least 1, got 0"):
        Arena(0)
