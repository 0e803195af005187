"""One record on a fake device: every row of the table of moves, every move that is not in it, and the four orders."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest

from hyper_parallel.core.activation_checkpoint.far.tier import Refusal
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.residency import MOVES, Move, Residency, next_residency
from hyper_parallel.errors import SwapStateError

from .calls import UNIT, FakeSource, Schedule, make_move
from .fake_device import FakeDevice

PATHS = {
    Residency.DEVICE: (),
    Residency.D2H: (Move.START_OFFLOAD,),
    Residency.HOST: (Move.START_OFFLOAD, Move.FINISH_OFFLOAD),
    Residency.H2D: (Move.START_OFFLOAD, Move.FINISH_OFFLOAD, Move.START_LOAD),
}
"""How a new record gets into each state."""
LEGAL = sorted(MOVES, key=str)
ILLEGAL = sorted(set(itertools.product(Residency, Move)) - set(MOVES), key=str)


def record_in(state: Residency, schedule: Schedule) -> Record:
    record = schedule.save("a", stays=True)
    for move in PATHS[state]:
        make_move(record, move)
    assert record.residency is state
    return record


def picture(record: Record) -> tuple[Any, ...]:
    """Everything that a move may change."""
    return (
        record.residency,
        record.device_bytes,
        record.lease,
        record.out,
        record.back,
        record.stream,
        record.has_foreign_readers,
    )


def test_the_table_has_five_rows_and_fifteen_moves_are_illegal() -> None:
    assert (len(LEGAL), len(ILLEGAL)) == (5, 15)


@pytest.mark.parametrize(("state", "move"), LEGAL, ids=str)
def test_a_legal_move_leads_where_the_table_says(state: Residency, move: Move) -> None:
    record = record_in(state, Schedule())
    make_move(record, move)
    assert record.residency is MOVES[state, move] is next_residency(state, move)


@pytest.mark.parametrize(("state", "move"), ILLEGAL, ids=str)
def test_an_illegal_move_raises_and_changes_nothing(state: Residency, move: Move) -> None:
    schedule = Schedule()
    record = record_in(state, schedule)
    before, _ = picture(record), schedule.device.take_log()
    legal = ", ".join(sorted(known.value for known_state, known in MOVES if known_state is state))
    with pytest.raises(SwapStateError, match=f"^record: cannot {move.value} while {state.value}; legal now: {legal}$"):
        make_move(record, move)
    assert picture(record) == before
    assert schedule.device.log == []


def test_the_four_orders_of_a_records_life_as_a_list_of_calls() -> None:
    schedule = Schedule()
    device, record = schedule.device, schedule.save("a", stays=True)
    assert device.take_log() == []
    record.start_offload()
    assert device.take_log() == [
        "compute: record e1",
        "out: wait e1",  # 1. the copy out starts after the producer
        "out: record e2",
        "out: copy 64",
        "out: record e3",
    ]
    record.finish_offload()
    assert device.take_log() == ["compute: wait e3", "host: drop 64"]  # 2. dropped after the copy out
    record.start_load()
    assert device.take_log() == [
        "compute: allocate 64",
        "compute: record e4",
        "back: wait e4",  # 3. the load writes after the buffer is ours
        "back: wait e3",
        "back: copy 64",
        "back: record e5",
    ]
    record.finish_load()
    assert device.take_log() == ["compute: wait e5"]  # 4. a consumer reads after the load
    device.run()
    assert bytes(record.device_bytes) == b"a" * UNIT


def test_a_cancelled_offload_keeps_the_device_bytes_and_a_second_one_copies_nothing() -> None:
    schedule = Schedule()
    record = schedule.save("a", stays=True)
    record.start_offload()
    record.cancel_offload()
    assert bytes(record.device_bytes) == b"a" * UNIT
    schedule.device.take_log()
    record.start_offload()
    record.finish_offload()
    assert schedule.device.take_log() == ["compute: wait e3", "host: drop 64"]


def test_device_bytes_go_with_our_reference_once_the_streams_ran() -> None:
    schedule = Schedule()
    record = schedule.save("a", stays=True)
    record.start_offload()
    schedule.device.run()
    assert schedule.device.held_bytes() == UNIT
    record.finish_offload()
    assert schedule.device.held_bytes() == 0


@pytest.mark.parametrize("state", list(Residency), ids=str)
def test_a_record_that_dies_orders_its_stream_after_the_last_copy_that_touches_its_bytes(state: Residency) -> None:
    schedule = Schedule()
    record = record_in(state, schedule)
    alive = weakref.ref(record)
    schedule.device.take_log()
    del record
    assert alive() is None
    assert (
        schedule.device.take_log()
        == {
            Residency.DEVICE: ["host: drop 64"],
            Residency.D2H: ["compute: wait e3", "host: drop 64"],
            Residency.HOST: [],
            Residency.H2D: ["compute: wait e5", "host: drop 64"],
        }[state]
    )
    schedule.device.run()
    assert schedule.device.held_bytes() == 0
    assert [tier.live_bytes for tier in schedule.far.statistics()] == [0]


def test_a_reader_on_another_stream_is_ordered_after_the_load_and_the_owner_after_the_reader() -> None:
    schedule = Schedule()
    device, record = schedule.device, record_in(Residency.H2D, schedule)
    record.finish_load()
    device.take_log()
    main, device.current = device.current, device.new_stream()
    record.add_reader()
    record.add_reader()  # known already
    assert device.take_log() == ["stream2: wait e5"]
    assert record.has_foreign_readers
    device.current = main
    record.start_offload()
    record.finish_offload()
    assert device.take_log() == ["stream2: record e6", "compute: wait e6", "host: drop 64"]
    assert not record.has_foreign_readers


def test_a_load_that_finishes_on_another_stream_orders_both() -> None:
    schedule = Schedule()
    device, record = schedule.device, record_in(Residency.H2D, schedule)
    device.take_log()
    device.current = device.new_stream()
    record.finish_load()
    assert device.take_log() == ["stream2: wait e5"]
    record.start_offload()
    record.finish_offload()
    assert device.take_log() == ["compute: wait e5", "stream2: record e6", "compute: wait e6", "host: drop 64"]


def test_a_refused_offload_leaves_the_record_as_it_was() -> None:
    schedule = Schedule(host_limit=0)
    record = schedule.save("a", stays=True)
    before, _ = picture(record), schedule.device.take_log()
    assert record.start_offload() is Refusal.OVER_LIMIT
    assert picture(record) == before
    assert schedule.device.log == []


def test_a_host_that_refuses_leaves_the_record_as_it_was() -> None:
    schedule = Schedule(FakeDevice(host_bytes=0))
    record = schedule.save("a", stays=True)
    before = picture(record)
    assert record.start_offload() is Refusal.NO_SPACE
    assert picture(record) == before


def test_a_copy_out_that_fails_leaves_the_state_and_can_be_tried_again() -> None:
    schedule = Schedule()
    device, record = schedule.device, schedule.save("a", stays=True)
    device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        record.start_offload()
    assert record.residency is Residency.DEVICE
    assert bytes(record.device_bytes) == b"a" * UNIT
    assert record.start_offload() is None
    assert [tier.live_bytes for tier in schedule.far.statistics()] == [UNIT], "the first try's room serves the second"
    record.finish_offload()
    record.start_load()
    record.finish_load()
    device.run()
    assert bytes(record.device_bytes) == b"a" * UNIT


def test_a_copy_back_that_fails_leaves_the_state_and_can_be_tried_again() -> None:
    schedule = Schedule()
    device, record = schedule.device, record_in(Residency.HOST, schedule)
    device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        record.start_load()
    assert (record.residency, record.device_bytes) == (Residency.HOST, None)
    device.take_log()
    record.start_load()
    assert "compute: allocate 64" not in device.take_log()  # the first try's buffer serves the second
    record.finish_load()
    device.run()
    assert bytes(record.device_bytes) == b"a" * UNIT


def test_a_full_device_leaves_a_record_in_far_memory() -> None:
    schedule = Schedule()
    record = record_in(Residency.HOST, schedule)
    schedule.device.capacity_bytes = 0
    before = picture(record)
    with pytest.raises(MemoryError, match="the fake device has 0 bytes"):
        record.start_load()
    assert picture(record) == before


def test_a_snapshot_is_exact_only_when_the_source_was_unchanged_until_the_drop() -> None:
    schedule = Schedule()
    answers = [True, False]
    records = [schedule.save(name, stays=True, source=FakeSource(is_unchanged=lambda: answers.pop(0))) for name in "ab"]
    for record in records:
        record.start_offload()
        record.finish_offload()
    assert [record.snapshot_is_exact for record in records] == [True, False]
