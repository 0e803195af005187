"""The schedule of a forward on a fake device: what leaves when, what stays, what is shared, what an error leaves."""

from __future__ import annotations

import gc

import pytest

from hyper_parallel.core.activation_checkpoint.residency import Residency

from .calls import UNIT, FakeSource, Schedule, check_window, copy_out_before_change, tags
from .fake_device import FakeDevice


def test_values_leave_in_the_order_in_which_they_were_saved() -> None:
    schedule = Schedule(window_bytes=10 * UNIT)
    held = schedule.save_all("abc")
    assert schedule.take_events() == ["offload a", "offload b", "offload c"]
    assert [record.residency for record in held] == [Residency.D2H] * 3


def test_the_calls_of_two_saves_with_a_window_of_one() -> None:
    schedule = Schedule(window_bytes=UNIT)
    held = schedule.save_all("ab")
    assert schedule.device.take_log() == [
        "compute: record e1",
        "out: wait e1",
        "out: record e2",
        "out: copy 64",
        "out: record e3",
        "compute: record e4",
        "out: wait e4",
        "out: copy 64",  # a small copy is timed now and then only: it has no event at its start
        "out: record e5",
        "compute: record e6",  # the moment from which compute may have to wait
        "compute: wait e3",
        "host: drop 64",
    ]
    assert [record.residency for record in held] == [Residency.HOST, Residency.D2H]


@pytest.mark.parametrize("tail", [0, 1, 2, 5])
def test_the_newest_values_within_the_tail_do_not_leave(tail: int) -> None:
    schedule = Schedule(tail_bytes=tail * UNIT)
    held = schedule.save_all("abcde")
    gone = "abcde"[: 5 - tail]
    assert schedule.take_events() == [f"{what} {name}" for name in gone for what in ("offload", "drop")]
    assert [record.residency for record in held] == [Residency.HOST] * len(gone) + [Residency.DEVICE] * tail
    assert schedule.device.held_bytes() == tail * UNIT + (len(gone) * UNIT)  # queued copies still hold their sources
    schedule.device.run()
    assert schedule.device.held_bytes() == tail * UNIT


def test_one_value_larger_than_the_tail_leaves_at_once() -> None:
    schedule = Schedule(tail_bytes=UNIT)
    held = [schedule.save("a"), schedule.save("b", nbytes=2 * UNIT)]
    assert schedule.take_events() == ["offload a", "offload b", "drop a", "drop b"]
    assert len(held) == 2


@pytest.mark.parametrize("window", [0, 1, 2])
def test_past_the_window_the_oldest_copy_is_waited_for_and_dropped(window: int) -> None:
    schedule = Schedule(window_bytes=window * UNIT)
    held = []
    for at, name in enumerate("abcd"):
        held.append(schedule.save(name))
        dropped = [f"drop {'abcd'[at - window]}"] if at >= window else []
        assert schedule.take_events() == [f"offload {name}", *dropped]
        assert schedule.engine.in_flight_bytes == min(at + 1, window) * UNIT


def test_inside_the_window_nothing_is_dropped_before_the_copys_event_happened() -> None:
    schedule = Schedule(window_bytes=10 * UNIT)
    held = [schedule.save("a")]
    schedule.device.run("compute")
    held.append(schedule.save("b"))
    assert schedule.take_events() == ["offload a", "offload b"]
    schedule.device.run()  # now both copies end
    held.append(schedule.save("c"))
    assert schedule.take_events() == ["offload c", "drop a", "drop b"]
    assert [record.residency for record in held] == [Residency.HOST, Residency.HOST, Residency.D2H]


def test_compute_is_ordered_after_the_copy_before_our_reference_goes() -> None:
    schedule = Schedule(window_bytes=10 * UNIT)
    record = schedule.save("a")
    schedule.device.take_log()
    schedule.engine.finish_offload(record)
    assert schedule.device.take_log() == ["compute: record e4", "compute: wait e3", "host: drop 64"]
    schedule.device.run("compute")
    assert len(schedule.device.current.steps) == 1, "compute stands still until the copy ran"
    schedule.device.run()
    assert len(schedule.device.current.steps) == 0


def test_a_dead_record_in_the_tail_or_the_window_is_passed_over() -> None:
    schedule = Schedule(tail_bytes=UNIT, window_bytes=UNIT)
    held = schedule.save_all("abc")  # c in the tail, b in flight, a gone
    assert schedule.take_events() == ["offload a", "offload b", "drop a"]
    del held[1:]
    held.append(schedule.save("d"))
    held.append(schedule.save("e"))
    held.append(schedule.save("f"))
    assert schedule.take_events() == ["offload d", "offload e", "drop d"]
    assert tags(sorted(schedule.engine.live_records(), key=lambda record: str(record.tag))) == ["a", "d", "e", "f"]


def test_what_stays_or_is_protected_does_not_leave_and_can_be_let_leave() -> None:
    schedule = Schedule(tail_bytes=UNIT)
    stays = schedule.save("a", stays=True)
    protected = schedule.save("b")
    protected.is_protected = True
    held = [schedule.save("c"), schedule.save("d")]
    assert schedule.take_events() == ["offload c", "drop c"]
    protected.is_protected = stays.stays = False
    schedule.engine.enqueue(stays)
    assert schedule.take_events() == ["offload d", "drop d"]
    schedule.engine.enqueue(protected)
    assert schedule.take_events() == ["offload a", "drop a"]
    assert len(held) == 2


def test_a_storage_at_the_same_version_is_found_again_and_counted() -> None:
    schedule = Schedule()
    is_alive = [True]
    record = schedule.save("a", source=FakeSource(7, 3, is_alive=lambda: is_alive[0]))
    assert schedule.engine.find(FakeSource(7, 3)) is record
    assert schedule.engine.find(FakeSource(7, 4)) is None
    assert schedule.engine.find(FakeSource(8, 3)) is None
    schedule.engine.share(record)
    assert (record.shares, schedule.counters.shared_copies, schedule.counters.shared_bytes) == (1, 1, UNIT)
    is_alive[0] = False  # the storage died: its key may name another one now
    assert schedule.engine.find(FakeSource(7, 3)) is None


def test_a_dead_record_is_not_found_and_a_newer_one_takes_its_place() -> None:
    schedule = Schedule()
    older = schedule.save("a", source=FakeSource("x", 0))
    newer = schedule.save("b", source=FakeSource("x", 1))
    assert (schedule.engine.find(FakeSource("x", 0)), schedule.engine.find(FakeSource("x", 1))) == (None, newer)
    del older, newer
    assert schedule.engine.find(FakeSource("x", 1)) is None


def test_a_change_in_place_is_ordered_after_the_copy_out() -> None:
    schedule = Schedule(tail_bytes=10 * UNIT)
    record = schedule.save("a")
    source = record.device_bytes
    assert copy_out_before_change(schedule.engine, record)
    assert schedule.take_events() == ["offload a", "drop a"]
    schedule.device.queue(lambda: source.__setitem__(slice(None), b"z" * UNIT))
    schedule.device.run()
    assert bytes(source) == b"z" * UNIT
    assert schedule.read(record) == "a"


def test_a_change_in_place_of_bytes_that_found_no_room_is_told() -> None:
    schedule = Schedule(tail_bytes=10 * UNIT, host_limit=0)
    record = schedule.save("a")
    assert not copy_out_before_change(schedule.engine, record)
    assert record.residency is Residency.DEVICE
    assert dict(schedule.counters.kept_bytes) == {"over_limit": UNIT}


def test_a_value_that_changed_in_the_tail_does_not_leave() -> None:
    schedule = Schedule(tail_bytes=UNIT)
    changed = schedule.save("a", source=FakeSource(is_unchanged=lambda: False))
    held = [schedule.save("b"), schedule.save("c")]
    assert schedule.take_events() == ["offload b", "drop b"]
    assert changed.residency is Residency.DEVICE
    assert len(held) == 2


def test_over_the_cap_a_value_stays_and_is_counted_by_reason() -> None:
    schedule = Schedule(host_limit=4096)  # one page
    held = schedule.save_all("abc", nbytes=2048)
    assert schedule.take_events() == ["offload a", "drop a", "offload b", "drop b"]
    assert [record.residency for record in held] == [Residency.HOST, Residency.HOST, Residency.DEVICE]
    assert dict(schedule.counters.kept_bytes) == {"over_limit": 2048}
    assert [schedule.read(record) for record in held] == ["a", "b", "c"]


def test_a_host_without_memory_keeps_values_on_the_device_by_that_reason() -> None:
    schedule = Schedule(FakeDevice(host_bytes=0))
    record = schedule.save("a")
    assert (record.residency, dict(schedule.counters.kept_count)) == (Residency.DEVICE, {"no_space": 1})


def test_a_copy_that_fails_in_a_forward_leaves_queues_and_states_intact() -> None:
    schedule = Schedule(tail_bytes=UNIT)
    held = [schedule.save("a")]
    schedule.device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        schedule.save("b")
    assert schedule.take_events() == []
    gc.collect()  # the error's traceback held the record of b
    held += [schedule.save("c"), schedule.save("d")]
    schedule.engine.enqueue(held[0])
    assert schedule.take_events() == ["offload c", "drop c", "offload d", "drop d"]
    assert [schedule.read(record) for record in held] == ["a", "c", "d"]


def test_with_a_limit_for_the_device_copies_lag_while_there_is_room() -> None:
    schedule = Schedule(device_bytes=3 * UNIT)
    held = schedule.save_all("abc")
    assert schedule.take_events() == ["offload a", "offload b", "offload c"]
    held.append(schedule.save("d"))
    assert schedule.take_events() == ["offload d", "drop a", "drop b", "drop c", "drop d"]


def test_inside_a_region_the_limit_is_a_question_for_its_end() -> None:
    schedule = Schedule(device_bytes=UNIT)
    held = [schedule.save(name, is_in_region=True) for name in "abc"]
    assert schedule.take_events() == ["offload a", "offload b", "offload c"]
    check_window(schedule.engine)
    assert schedule.take_events() == ["drop a", "drop b", "drop c"]
    assert len(held) == 3


def test_launching_by_hand_ignores_the_tail_and_does_nothing_twice() -> None:
    schedule = Schedule(tail_bytes=10 * UNIT, window_bytes=10 * UNIT)
    record = schedule.save("a")
    for _ in range(2):
        schedule.engine.launch_offload(record)
    for _ in range(2):
        schedule.engine.finish_offload(record)
    for _ in range(2):
        schedule.engine.launch_load(record)
    for _ in range(2):
        schedule.engine.finish_load(record)
    assert schedule.take_events() == ["offload a", "drop a", "load a"]
    assert schedule.read(record) == "a"


def test_bytes_by_tag_and_both_directions_are_counted_once() -> None:
    schedule = Schedule()
    held = schedule.save_all("ab")
    for record in held:
        schedule.read(record)
    counters = schedule.counters
    assert (counters.swapped_out_bytes, counters.swapped_in_bytes, counters.misses) == (2 * UNIT, 2 * UNIT, 2)
    assert dict(counters.bytes_by_tag) == {"a": UNIT, "b": UNIT}


def test_the_peak_counts_what_records_hold() -> None:
    schedule = Schedule(tail_bytes=UNIT, window_bytes=2 * UNIT)
    held = schedule.save_all("abcdef")
    tail_bytes, window_bytes = UNIT, 2 * UNIT
    assert schedule.counters.peak_resident_bytes == tail_bytes + window_bytes
    assert len(held) == 6
