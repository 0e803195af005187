"""The order in which a backward wants records, and the bytes that are ahead of it."""

from __future__ import annotations

import pytest

from hyper_parallel.core.activation_checkpoint.forecast import Forecast, everything_below, prefetch_order
from hyper_parallel.core.activation_checkpoint.record import Position, Record

from .calls import UNIT, Schedule, tags


def saved(*places: tuple[str, int, int]) -> list[Record]:
    """Records by name, sequence number of the node, and index."""
    schedule = Schedule(tail_bytes=2**20)
    return [schedule.save(name, sequence=sequence, index=index) for name, sequence, index in places]


def everything(first: int, last: int) -> bool:
    return True


def test_the_highest_sequence_is_wanted_first_and_then_the_lowest_index() -> None:
    records = saved(("a", 1, 0), ("b", 3, 1), ("c", 3, 0), ("d", 2, 0))
    assert tags(prefetch_order(records, everything)) == ["c", "b", "d", "a"]


def test_what_cannot_be_reached_is_left_out() -> None:
    records = saved(("a", 1, 0), ("b", 2, 0), ("c", 3, 0))
    assert tags(prefetch_order(records, lambda first, last: first != 2)) == ["c", "a"]


def test_a_position_that_a_region_moved_is_reached_by_any_number_in_between() -> None:
    records = saved(("a", 1, 0), ("b", 4, 0))
    records[0].position.sequence = 6  # the region that made a ended at 6
    asked: list[tuple[int, int]] = []
    assert tags(prefetch_order(records, lambda first, last: asked.append((first, last)) is None)) == ["a", "b"]
    assert asked == [(1, 6), (4, 4)]


@pytest.mark.parametrize(("at", "reached"), [(0, []), (1, ["a"]), (2, ["b", "a"]), (9, ["c", "b", "a"])])
def test_without_a_graph_everything_below_counts_as_reached(at: int, reached: list[str]) -> None:
    records = saved(("a", 1, 0), ("b", 2, 0), ("c", 3, 0))
    assert tags(prefetch_order(records, everything_below(Position(at)))) == reached


def test_the_head_stays_until_it_is_dealt_with() -> None:
    records = saved(("a", 1, 0), ("b", 2, 0))
    forecast = Forecast(records, everything)
    assert [forecast.upcoming() for _ in range(2)] == [records[1], records[1]]
    forecast.advance()
    assert forecast.upcoming() is records[0]
    forecast.advance()
    assert forecast.upcoming() is None


def test_dead_and_wanted_records_are_passed_over() -> None:
    records = saved(("a", 1, 0), ("b", 2, 0), ("c", 3, 0), ("d", 4, 0))
    forecast = Forecast(records, everything)
    records[3].is_wanted = True
    del records[2]
    assert tags(forecast.next_ones()) == ["b", "a"]
    assert forecast.upcoming() is records[1]
    assert tags(forecast.next_ones()) == ["b", "a"]


def test_bytes_ahead_are_those_brought_and_not_asked_for() -> None:
    records = saved(("a", 1, 0), ("b", 2, 0), ("c", 3, 0))
    forecast = Forecast(records, everything)
    for record in records:
        forecast.loaded(record)
    assert (tags(forecast.ahead()), forecast.ahead_bytes()) == (["a", "b", "c"], 3 * UNIT)
    forecast.asked(records[2])
    assert forecast.ahead_bytes() == 2 * UNIT
    del record, records[0]
    assert (tags(forecast.ahead()), forecast.ahead_bytes()) == (["b"], UNIT)


def test_a_record_that_two_backwards_bring_is_ahead_of_the_last_one_only() -> None:
    records = saved(("a", 1, 0))
    first, second = Forecast(records, everything), Forecast(records, everything)
    first.loaded(records[0])
    second.loaded(records[0])
    assert (first.ahead_bytes(), first.ahead(), second.ahead_bytes(), second.ahead()) == (0, [], UNIT, records)
    records.clear()
    assert (first.ahead_bytes(), second.ahead_bytes()) == (0, 0)


def test_a_forecast_keeps_no_record_alive() -> None:
    records = saved(("a", 1, 0))
    forecast = Forecast(records, everything)
    forecast.loaded(records[0])
    forecast.touch(records[0])
    records.clear()
    assert (forecast.upcoming(), forecast.ahead(), forecast.touched()) == (None, [], [])
