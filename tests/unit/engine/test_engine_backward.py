"""The schedule of a backward on a fake device: order, bytes ahead, misses, full devices, retained graphs."""

from __future__ import annotations

import pytest

from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.residency import Residency

from .calls import UNIT, Schedule, Task, begin_replay, drop_after_replay
from .fake_device import FakeDevice


def forward(names: str, device: FakeDevice | None = None, **settings: int) -> tuple[Schedule, list[Record]]:
    """A forward that saved one value per letter; its events are forgotten, and its copies ran."""
    schedule = Schedule(device, **settings)
    records = schedule.save_all(names)
    schedule.device.run()
    schedule.take_events()
    schedule.device.take_log()
    return schedule, records


def test_without_look_ahead_every_value_is_a_miss() -> None:
    schedule, records = forward("abc")
    task = Task()
    assert [schedule.read(record, task) for record in reversed(records)] == ["c", "b", "a"]
    assert schedule.take_events() == [f"{what} {name}" for name in "cba" for what in ("miss", "load", "use")]
    assert (schedule.counters.misses, schedule.counters.prefetch_hits) == (3, 0)


def test_the_calls_of_a_miss() -> None:
    schedule, (record,) = forward("a")
    schedule.engine.fetch(record, Task())
    assert schedule.device.take_log() == [
        "compute: allocate 64",
        "compute: record e5",
        "back: wait e5",
        "back: wait e3",
        "back: copy 64",
        "back: record e6",
        "compute: record e7",  # the moment from which compute may have to wait
        "compute: wait e6",
    ]


LOADED_BEHIND_EACH_USE = {1: ["d", "c", "b", "a", ""], 2: ["dc", "b", "a", "", ""], 3: ["dcb", "a", "", "", ""]}
"""By how many values loads run ahead: what is loaded after e, d, c, b and a were used."""


@pytest.mark.parametrize("ahead", sorted(LOADED_BEHIND_EACH_USE))
def test_loads_run_ahead_by_the_bytes_that_were_set_last_saved_first(ahead: int) -> None:
    schedule, records = forward("abcde", prefetch_bytes=ahead * UNIT)
    task = Task()
    for name, loaded in zip("edcba", LOADED_BEHIND_EACH_USE[ahead], strict=True):
        assert schedule.read(records.pop(), task) == name
        first = ["miss e", "load e"] if name == "e" else []
        assert schedule.take_events() == [*first, f"use {name}", *(f"load {later}" for later in loaded)]
    assert (schedule.counters.misses, schedule.counters.prefetch_hits) == (1, 4)


def test_values_of_one_node_come_in_the_order_of_their_index() -> None:
    schedule = Schedule(prefetch_bytes=10 * UNIT)
    held = [schedule.save(name, sequence=4, index=index) for name, index in (("b", 1), ("a", 0), ("c", 2))]
    schedule.take_events()
    begin_replay(schedule.engine, Task())
    assert schedule.take_events() == ["load a", "load b", "load c"]
    assert len(held) == 3


def test_what_a_backward_cannot_reach_is_not_brought_back() -> None:
    schedule, records = forward("abcd", prefetch_bytes=10 * UNIT)
    task = Task(lambda sequence: sequence in (0, 3))
    assert schedule.read(records[3], task) == "d"
    assert schedule.take_events() == ["miss d", "load d", "use d", "load a"]
    assert task.asked == 1
    assert schedule.read(records[2], task) == "c", "a wrong forecast costs time, never a value"
    assert task.asked == 1


def test_two_backwards_have_two_forecasts() -> None:
    schedule, records = forward("abcd", prefetch_bytes=UNIT)
    even, odd = Task(lambda sequence: sequence % 2 == 0), Task(lambda sequence: sequence % 2 == 1)
    assert schedule.read(records[3], odd) == "d"
    assert schedule.read(records[2], even) == "c"
    assert schedule.take_events() == ["miss d", "load d", "use d", "load b", "miss c", "load c", "use c", "load a"]


def test_a_value_still_in_flight_is_not_copied_back() -> None:
    schedule = Schedule(window_bytes=10 * UNIT)
    record = schedule.save("a")
    assert schedule.read(record, Task()) == "a"
    assert schedule.take_events() == ["offload a", "use a"]
    assert (record.residency, record.has_far_copy) == (Residency.DEVICE, True)


def test_what_is_wanted_soon_and_still_in_flight_stays() -> None:
    schedule = Schedule(tail_bytes=UNIT, window_bytes=10 * UNIT, prefetch_bytes=UNIT)
    records = schedule.save_all("abc")
    assert schedule.take_events() == ["offload a", "offload b"]
    schedule.device.run()  # both copies ended: without the forecast both would be dropped at the next look
    assert schedule.read(records[2], Task()) == "c"
    assert schedule.take_events() == ["use c", "drop a"]
    assert [record.residency for record in records] == [Residency.HOST, Residency.DEVICE, Residency.DEVICE]


def test_the_tail_is_counted_under_its_reason_once() -> None:
    schedule, (record,) = forward("a", tail_bytes=10 * UNIT)
    task = Task()
    schedule.read(record, task)
    schedule.read(record, task)
    assert (dict(schedule.counters.kept_count), schedule.counters.misses) == ({"needed_first": 1}, 0)


def test_a_value_read_twice_in_one_backward_is_brought_once() -> None:
    schedule, (record,) = forward("a")
    task = Task()
    assert [schedule.read(record, task) for _ in range(2)] == ["a", "a"]
    assert schedule.take_events() == ["miss a", "load a", "use a", "use a"]


def test_a_retained_graph_lets_go_at_the_end_and_a_second_backward_reads_the_same_far_copy() -> None:
    schedule, records = forward("ab", prefetch_bytes=10 * UNIT)
    for _ in range(2):
        task = Task()
        assert [schedule.read(record, task) for record in reversed(records)] == ["b", "a"]
        assert schedule.device.held_bytes() == 2 * UNIT
        task.end()
        schedule.device.run()
        assert schedule.device.held_bytes() == 0
        assert schedule.take_events() == ["miss b", "load b", "use b", "load a", "use a"]
    assert schedule.counters.swapped_out_bytes == 2 * UNIT


def test_a_load_that_nobody_asked_for_is_let_go_behind_its_event() -> None:
    schedule, records = forward("ab", prefetch_bytes=10 * UNIT)
    task = Task()
    schedule.engine.fetch(records[1], task)
    schedule.device.take_log()
    task.end()
    log = schedule.device.take_log()
    assert sorted(log) == ["compute: wait e12", "host: drop 64", "host: drop 64"]
    assert log[-1] == "host: drop 64"
    assert [record.residency for record in records] == [Residency.HOST, Residency.HOST]


def test_a_full_device_stops_the_look_ahead_and_brings_what_is_asked_for() -> None:
    schedule, records = forward("abc", FakeDevice(), prefetch_bytes=10 * UNIT)
    schedule.device.capacity_bytes = 2 * UNIT
    task = Task()
    assert schedule.read(records[2], task) == "c"
    assert schedule.take_events() == ["miss c", "load c", "use c", "load b"]
    del records[2]
    assert schedule.read(records[1], task) == "b"
    assert schedule.take_events() == ["use b", "load a"]


def test_a_full_device_gives_back_what_was_brought_ahead() -> None:
    schedule, records = forward("abc", FakeDevice(), prefetch_bytes=UNIT)
    task = Task(lambda sequence: sequence != 0)
    assert schedule.read(records[2], task) == "c"
    assert schedule.take_events() == ["miss c", "load c", "use c", "load b"]
    schedule.device.capacity_bytes = 2 * UNIT
    assert schedule.read(records[0], task) == "a", "room is made by what was brought ahead"
    assert schedule.take_events() == ["miss a", "load a", "use a"]
    assert [record.residency for record in records] == [Residency.DEVICE, Residency.HOST, Residency.DEVICE]


def test_a_device_too_full_for_what_is_asked_raises_and_leaves_every_state() -> None:
    schedule, records = forward("ab")
    schedule.device.capacity_bytes = 0
    with pytest.raises(MemoryError, match="the fake device has 0 bytes"):
        schedule.engine.fetch(records[1], Task())
    assert [record.residency for record in records] == [Residency.HOST, Residency.HOST]
    schedule.device.capacity_bytes = None
    task = Task()
    assert [schedule.read(record, task) for record in reversed(records)] == ["b", "a"]


def test_a_load_that_fails_raises_and_the_next_try_gives_the_value() -> None:
    schedule, (record,) = forward("a")
    schedule.device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        schedule.engine.fetch(record, Task())
    assert record.residency is Residency.HOST
    assert schedule.read(record, Task()) == "a"


def test_a_replay_starts_its_loads_before_the_first_value_is_asked_for() -> None:
    schedule, records = forward("abc", prefetch_bytes=2 * UNIT)
    task = Task()
    begin_replay(schedule.engine, task)
    assert schedule.take_events() == ["load c", "load b"]
    assert schedule.read(records[2], task) == "c"
    assert schedule.take_events() == ["use c", "load a"]
    assert (schedule.counters.misses, schedule.counters.prefetch_hits) == (0, 1)


def test_a_replay_far_from_our_values_takes_free_room_only() -> None:
    schedule, records = forward("abc", prefetch_bytes=2 * UNIT)
    begin_replay(schedule.engine, Task(), is_near=False)
    assert schedule.take_events() == [], "no limit was set, so nobody knows what is free"
    schedule, records = forward("abc", prefetch_bytes=2 * UNIT, device_bytes=UNIT)
    begin_replay(schedule.engine, Task(), is_near=False)
    assert schedule.take_events() == ["load c"]
    assert len(records) == 3


def test_with_a_limit_for_the_device_loads_run_further_than_the_setting() -> None:
    schedule, records = forward("abcd", device_bytes=3 * UNIT)
    assert schedule.read(records[3], Task()) == "d"
    assert schedule.take_events() == ["miss d", "load d", "use d", "load c", "load b"]


def test_after_a_replay_a_value_that_nobody_else_counts_on_goes() -> None:
    schedule, records = forward("ab")
    task = Task()
    for record in records:
        schedule.read(record, task)
    schedule.engine.share(records[1])
    for record in records:
        drop_after_replay(schedule.engine, record)
    assert [record.residency for record in records] == [Residency.HOST, Residency.DEVICE]


def test_after_a_replay_a_value_that_another_stream_reads_stays() -> None:
    schedule, (record,) = forward("a")
    task = Task()
    schedule.read(record, task)
    schedule.device.current = schedule.device.new_stream()
    schedule.read(record, task)
    drop_after_replay(schedule.engine, record)
    assert record.residency is Residency.DEVICE


def test_backwards_that_never_end_are_closed_after_thirty_two_of_them() -> None:
    schedule, (record,) = forward("a")
    assert [schedule.read(record, Task()) for _ in range(32)] == ["a"] * 32
    assert schedule.take_events() == ["miss a", "load a", *["use a"] * 32]
    assert schedule.read(record, Task()) == "a"
    assert schedule.take_events() == ["miss a", "load a", "use a"], (
        "the oldest was closed, and let go what it had brought"
    )


def test_a_value_read_outside_a_backward_is_not_forecast() -> None:
    schedule, records = forward("ab", prefetch_bytes=10 * UNIT)
    assert schedule.read(records[1]) == "b"
    assert schedule.take_events() == ["miss b", "load b", "use b"]


def test_room_in_far_memory_is_used_again_behind_the_load_that_reads_it() -> None:
    schedule = Schedule(host_limit=4096)
    record = schedule.save("a", nbytes=4096)  # the whole of far memory
    schedule.device.run()
    found = schedule.engine.fetch(record, Task())
    del record
    schedule.device.take_log()
    held = schedule.save("b", nbytes=4096)
    assert schedule.device.take_log() == [
        "compute: record e8",
        "out: wait e8",
        "out: wait e6",  # the load that still reads this room
        "out: copy 4096",
        "out: record e9",
        "compute: record e10",
        "compute: wait e9",
        "host: drop 4096",
    ]
    schedule.device.run()
    assert bytes(found) == b"a" * 4096
    assert schedule.read(held) == "b"
