"""Copies that are launched together, on a fake device: what is shared, what is not, and what a failure leaves."""

from __future__ import annotations

import gc

import pytest

from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.residency import Residency

from .calls import UNIT, FakeSource, Schedule, Task, check_window, copy_out_before_change

WINDOW = 128 * UNIT
"""Copies out are launched by a 32nd of it: four values."""
PREFETCH = 64 * UNIT
"""Loads are launched by a 16th of it: four values."""


def test_four_small_values_are_launched_together_behind_one_event_and_before_one() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("abc")
    assert (schedule.device.take_log(), schedule.take_events()) == ([], [])
    held.append(schedule.save("d"))
    assert schedule.device.take_log() == [
        "compute: record e1",
        "out: wait e1",
        "out: record e2",
        *["out: copy 64"] * 4,
        "out: record e3",
    ]
    assert schedule.take_events() == [f"offload {name}" for name in "abcd"]
    assert len({id(record.out) for record in held}) == 1
    assert len({id(record.lease) for record in held}) == 4
    assert schedule.counters.swapped_out_bytes == 4 * UNIT
    assert [schedule.read(record) for record in held] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("ends", ["scope", "region"])
def test_the_end_of_a_scope_or_a_region_launches_what_waits(ends: str) -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("ab")
    if ends == "scope":
        schedule.engine.launch_batch(trims_window=True)
    else:
        check_window(schedule.engine)
    assert schedule.take_events() == ["offload a", "offload b"]
    assert [record.residency for record in held] == [Residency.D2H] * 2


def test_a_large_value_leaves_at_once_and_alone_behind_what_waited() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = [schedule.save("a"), schedule.save("b"), schedule.save("c", nbytes=4 * UNIT)]
    assert schedule.take_events() == ["offload a", "offload b", "offload c"]
    assert held[0].out is held[1].out is not held[2].out


def test_values_of_two_streams_are_not_launched_together() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("ab")
    schedule.device.current = schedule.device.new_stream()
    held += [schedule.save("c"), schedule.save("d")]
    assert schedule.take_events() == ["offload a", "offload b"]
    schedule.engine.launch_batch(trims_window=True)
    assert [line for line in schedule.device.take_log() if "record" in line and "out" not in line] == [
        "compute: record e1",
        "stream2: record e4",
    ]
    assert held[0].out is held[1].out is not held[2].out is held[3].out


def test_what_waits_for_its_batch_counts_in_the_window() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = [schedule.save(f"v{at}") for at in range(300)]
    assert schedule.counters.peak_resident_bytes == WINDOW
    assert len(held) == 300


def test_each_value_of_a_batch_is_dropped_by_itself_and_compute_waits_once() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = [schedule.save(f"v{at}") for at in range(128)]
    assert schedule.take_events() == [f"offload v{at}" for at in range(128)]
    waits = []
    for at in range(128, 132):
        schedule.device.take_log()
        held.append(schedule.save(f"v{at}"))
        waits.append([line for line in schedule.device.take_log() if line.startswith("compute: wait")])
        assert [event for event in schedule.take_events() if event.startswith("drop")] == [f"drop v{at - 128}"]
    assert waits == [["compute: wait e3"], [], [], []]


def test_a_dead_value_or_one_that_shall_stay_is_passed_over() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("abc")
    del held[0]
    held[0].stays = True
    schedule.engine.launch_batch(trims_window=True)
    assert schedule.take_events() == ["offload c"]
    assert held[0].residency is Residency.DEVICE


def test_a_value_that_is_about_to_change_is_launched_before_the_change_and_its_batch_passes_it_over() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("abc")
    source = held[1].device_bytes
    assert copy_out_before_change(schedule.engine, held[1])
    schedule.device.queue(lambda: source.__setitem__(slice(None), b"z" * UNIT))
    assert schedule.take_events() == ["offload b", "drop b"]
    schedule.engine.launch_batch(trims_window=True)
    assert schedule.take_events() == ["offload a", "offload c"]
    assert [schedule.read(record) for record in held] == ["a", "b", "c"]


def test_a_value_that_changed_while_it_waited_does_not_leave() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = [schedule.save("a", source=FakeSource(is_unchanged=lambda: False)), schedule.save("b"), schedule.save("c")]
    schedule.engine.launch_batch(trims_window=True)
    assert schedule.take_events() == ["offload b", "offload c"]
    assert held[0].residency is Residency.DEVICE


def test_a_copy_that_fails_leaves_all_values_of_its_batch_where_they_were() -> None:
    schedule = Schedule(window_bytes=WINDOW)
    held = schedule.save_all("abc")
    schedule.device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        schedule.save("d")
    assert (schedule.take_events(), schedule.engine.in_flight_bytes) == ([], 0)
    assert [(record.residency, record.out) for record in held] == [(Residency.DEVICE, None)] * 3
    assert "host: synchronize" in " ".join(schedule.device.take_log()), "what was queued has ended"
    for record in held:
        schedule.engine.enqueue(record)
    schedule.engine.launch_batch(trims_window=True)
    assert schedule.take_events() == ["offload a", "offload b", "offload c"]
    assert [schedule.read(record) for record in held] == ["a", "b", "c"]


def test_over_the_cap_a_part_of_a_batch_leaves_and_the_rest_is_counted() -> None:
    schedule = Schedule(window_bytes=32 * 4096, host_limit=4096)  # one page
    held = schedule.save_all("abcd", nbytes=1536)
    schedule.engine.launch_batch(trims_window=True)
    assert schedule.take_events() == ["offload a", "offload b"]
    assert dict(schedule.counters.kept_count) == {"over_limit": 2}
    assert [schedule.read(record) for record in held] == ["a", "b", "c", "d"]


def in_far_memory(count: int) -> tuple[Schedule, list[Record]]:
    """A forward whose values are all in far memory."""
    schedule = Schedule(prefetch_bytes=PREFETCH)
    records = [schedule.save(f"{chr(97 + at % 26)}{at}", sequence=at) for at in range(count)]
    schedule.device.run()
    schedule.take_events()
    schedule.device.take_log()
    return schedule, records


def test_loads_run_ahead_in_batches_with_one_event_behind_their_buffers_and_one_at_the_end() -> None:
    schedule, records = in_far_memory(5)
    schedule.engine.start_prefetch(Task())
    log = schedule.device.take_log()
    first = log[: log.index("compute: allocate 64", 5)]
    assert [line for line in first if "wait" not in line] == [
        *["compute: allocate 64"] * 4,
        "compute: record e17",
        *["back: copy 64"] * 4,
        "back: record e18",
    ]
    assert first.count("back: wait e17") == 1
    assert schedule.take_events() == ["load e4", "load d3", "load c2", "load b1", "load a0"]
    assert len({id(record.back) for record in records}) == 2
    schedule.device.take_log()
    task = Task()
    assert [schedule.read(record, task) for record in reversed(records)] == ["e", "d", "c", "b", "a"]


def test_compute_waits_once_for_the_loads_of_a_batch() -> None:
    schedule, records = in_far_memory(4)
    task = Task()
    schedule.engine.start_prefetch(task)
    schedule.device.take_log()
    for record in reversed(records):
        schedule.engine.fetch(record, task)
    assert [line for line in schedule.device.take_log() if line.startswith("compute: wait")] == ["compute: wait e15"]
    assert (schedule.counters.prefetch_hits, schedule.counters.misses) == (4, 0)


def test_loads_wait_until_a_whole_batch_is_wanted_and_stay_within_the_bytes_that_were_set() -> None:
    schedule, records = in_far_memory(100)
    task = Task()
    schedule.engine.start_prefetch(task)
    loaded = []
    for record in reversed(records):
        schedule.take_events()
        schedule.engine.fetch(record, task)
        loaded.append(sum(event.startswith("load") for event in schedule.take_events()))
        records.pop()
        assert sum(record.ahead_in is not None for record in records) <= 64
    assert loaded[:8] == [0, 0, 0, 4, 0, 0, 0, 4]
    assert sum(loaded) == 100 - 64


def test_a_full_device_takes_the_first_loads_of_a_batch_and_the_rest_later() -> None:
    schedule, records = in_far_memory(4)
    schedule.device.capacity_bytes = 2 * UNIT
    task = Task()
    schedule.engine.start_prefetch(task)
    assert schedule.take_events() == ["load d3", "load c2"]
    schedule.device.capacity_bytes = None
    assert [schedule.read(record, task) for record in reversed(records)] == ["d", "c", "b", "a"]
    assert schedule.counters.misses == 0, "the rest was loaded when there was room again"


def test_loads_that_fail_leave_all_values_of_the_batch_in_far_memory() -> None:
    schedule, records = in_far_memory(4)
    task = Task()
    schedule.device.copy_fails = OSError("the link is down")
    with pytest.raises(OSError, match="the link is down"):
        schedule.engine.start_prefetch(task)
    assert [(record.residency, record.device_bytes) for record in records] == [(Residency.HOST, None)] * 4
    gc.collect()  # the error's traceback held the buffers
    assert schedule.device.held_bytes() == 0
    assert [schedule.read(record, task) for record in reversed(records)] == ["d", "c", "b", "a"]
