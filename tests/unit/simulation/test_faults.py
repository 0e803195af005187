"""A simulated device that is told to ignore a wait or an event; no framework is needed for it."""

from __future__ import annotations

import pytest

from hyper_parallel.simulation.streams import AccessLog, SimulatedStream, Timeline


def copied_and_read(*, skip_waits: tuple[int, ...] = (), skip_events: tuple[int, ...] = ()) -> tuple[list[str], bool]:
    """Two copies on a lane, each with an event that compute waits for: what ran, and whether a read of both is ordered."""
    timeline, accesses, done = Timeline("lazy", 0), AccessLog(), list[str]()
    timeline.skip_waits, timeline.skip_events = skip_waits, skip_events
    lane = timeline.new_lane()
    for at, name in enumerate(("first", "second")):
        timeline.tick(lane)
        accesses.touch(lane, at, 0, 8, is_write=True, what=name)
        timeline.enqueue(lane, lambda name=name: done.append(name))  # type: ignore[misc]
        timeline.wait(timeline.compute, timeline.record(lane))
    assert (timeline.num_waits, timeline.num_events) == (2, 2)
    conflicts = [accesses.conflict(timeline.compute, at, 0, 8, is_write=False) for at in range(2)]
    return done, conflicts == [None, None]


def test_with_every_wait_both_copies_ran_and_are_ordered() -> None:
    assert copied_and_read() == (["first", "second"], True)


@pytest.mark.parametrize("kind", ["skip_waits", "skip_events"])
def test_a_call_that_is_ignored_orders_nothing(kind: str) -> None:
    assert copied_and_read(**{kind: (1,)}) == (["first"], False)  # type: ignore[arg-type]
    assert copied_and_read(**{kind: (0, 1)}) == ([], False)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["skip_waits", "skip_events"])
def test_a_later_wait_on_the_same_stream_orders_what_an_ignored_one_did_not(kind: str) -> None:
    assert copied_and_read(**{kind: (0,)}) == (["first", "second"], True)  # type: ignore[arg-type]


def test_a_wait_of_the_host_is_counted_and_ignored_like_any_other() -> None:
    timeline, done = Timeline("lazy", 0), list[str]()
    lane: SimulatedStream = timeline.new_lane()
    timeline.enqueue(lane, lambda: done.append("copy"))
    event = timeline.record(lane)
    timeline.skip_waits = (0,)
    timeline.synchronize(event)
    assert (done, timeline.is_done(event)) == ([], False)
    timeline.synchronize(event)
    assert (done, timeline.is_done(event)) == (["copy"], True)


def test_an_event_that_was_never_recorded_counts_as_done_as_on_a_device() -> None:
    timeline = Timeline("lazy", 0)
    lane = timeline.new_lane()
    timeline.enqueue(lane, lambda: None)
    timeline.skip_events = (0,)
    assert timeline.is_done(timeline.record(lane))
    assert not timeline.is_done(timeline.record(lane))
