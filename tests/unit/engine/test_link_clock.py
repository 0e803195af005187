"""The measured link: rates, stalls and the bytes to run ahead, from events of the fake device; it never waits."""

from __future__ import annotations

import pytest

from hyper_parallel.core.activation_checkpoint.adapter import StreamCompletion
from hyper_parallel.core.activation_checkpoint.statistics import Counters
from hyper_parallel.core.activation_checkpoint.timing import LinkClock, LinkSpan

from .fake_device import FakeDevice, FakeEvent

FIRST_PREFETCH_BYTES = 256 * 2**20
FIRST_HORIZON_US, LONGEST_HORIZON_US = 8_000.0, 40_000.0


class Bench:
    """A clock, its device, and events at chosen times."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.device.new_stream()
        self.counters = Counters()
        self.clock = LinkClock(self.device, self.counters)

    def event(self, at_us: float | None = None) -> FakeEvent:
        event = FakeEvent("given", self.device.current)
        event.at_us = at_us
        return event

    def copy(
        self, nbytes: int, start_us: float | None, end_us: float | None, *, is_out: bool = False
    ) -> StreamCompletion:
        start = None if start_us is None else self.event(start_us)
        completion = StreamCompletion(self.device, start, self.event(end_us))
        self.clock.copied(completion, nbytes, is_out=is_out)
        return completion

    def stall(self, copy: StreamCompletion, *, at_us: float, end_us: float, is_load: bool) -> None:
        """Compute arrives at ``at_us`` at the end of a copy that ends at ``end_us``."""
        self.device.now_us = at_us
        self.clock.stalled(copy, is_load=is_load)
        self.device.run()
        copy.end.at_us = end_us


def test_before_a_measurement_a_guess_is_run_ahead() -> None:
    bench = Bench()
    assert bench.clock.prefetch_bytes == FIRST_PREFETCH_BYTES
    bench.copy(1000, 0.0, None)
    bench.clock.read_finished()
    assert (bench.clock.prefetch_bytes, bench.clock.back_bytes_per_us) == (FIRST_PREFETCH_BYTES, None)


def test_a_measured_rate_gives_the_bytes_of_the_horizon() -> None:
    bench = Bench()
    bench.copy(1000, 10.0, 20.0)
    bench.copy(500, 10.0, 20.0, is_out=True)
    bench.clock.read_finished()
    assert (bench.clock.back_bytes_per_us, bench.clock.out_bytes_per_us) == (100.0, 50.0)
    assert bench.clock.prefetch_bytes == int(100.0 * FIRST_HORIZON_US)
    assert bench.counters.copy_us == 20.0


def test_a_new_rate_counts_for_a_tenth() -> None:
    bench = Bench()
    bench.copy(1000, 0.0, 10.0)
    bench.copy(2000, 10.0, 20.0)
    bench.clock.read_finished()
    assert bench.clock.back_bytes_per_us == pytest.approx(0.9 * 100.0 + 0.1 * 200.0)


def test_measurements_are_read_in_order_and_only_when_done() -> None:
    bench = Bench()
    first, second = bench.copy(1000, 0.0, None), bench.copy(3000, 0.0, 10.0)
    bench.clock.read_finished()
    assert bench.clock.back_bytes_per_us is None, "the second waits behind the first"
    first.end.at_us = 10.0
    bench.clock.read_finished()
    assert bench.clock.back_bytes_per_us == pytest.approx(0.9 * 100.0 + 0.1 * 300.0)
    assert bench.counters.copy_us == 20.0
    assert second.is_done()
    assert [line for line in bench.device.log if "synchronize" in line] == []


def test_a_copy_without_length_is_no_measurement() -> None:
    bench = Bench()
    bench.copy(1000, 10.0, 10.0)
    bench.copy(1000, 10.0, 9.0)
    bench.clock.read_finished()
    assert (bench.clock.back_bytes_per_us, bench.counters.copy_us) == (None, 0.0)


def test_a_copy_that_is_not_timed_counts_what_the_measured_rate_says() -> None:
    bench = Bench()
    bench.copy(700, None, None)
    assert bench.counters.copy_us == 0.0
    bench.copy(1000, 0.0, 10.0)
    bench.clock.read_finished()
    bench.copy(700, None, None)
    assert bench.counters.copy_us == 10.0 + 7.0


def test_a_late_load_is_counted_and_lengthens_the_horizon_by_a_quarter_up_to_its_limit() -> None:
    bench = Bench()
    bench.copy(1000, 0.0, 10.0)
    bench.clock.read_finished()
    horizon_us = FIRST_HORIZON_US
    for late in range(1, 12):
        load = bench.copy(0, None, None)
        bench.stall(load, at_us=100.0, end_us=160.0, is_load=True)
        bench.clock.read_finished()
        horizon_us = min(horizon_us * 1.25, LONGEST_HORIZON_US)
        assert (bench.counters.late_loads, bench.counters.exposed_copy_us) == (late, late * 60.0)
        assert bench.clock.prefetch_bytes == int(100.0 * horizon_us)
    assert horizon_us == LONGEST_HORIZON_US


@pytest.mark.parametrize("end_us", [90.0, 100.0, 150.0])
def test_a_load_that_came_in_time_or_hardly_late_changes_nothing(end_us: float) -> None:
    bench = Bench()
    load = bench.copy(0, None, None)
    bench.stall(load, at_us=100.0, end_us=end_us, is_load=True)
    bench.clock.read_finished()
    assert (bench.counters.late_loads, bench.counters.exposed_copy_us) == (0, 0.0)


def test_a_stall_on_a_copy_out_is_exposed_time_and_no_late_load() -> None:
    bench = Bench()
    out = bench.copy(1000, 0.0, None, is_out=True)
    bench.stall(out, at_us=100.0, end_us=200.0, is_load=False)
    bench.clock.read_finished()
    assert (bench.counters.late_loads, bench.counters.exposed_copy_us) == (0, 100.0)


def test_a_copy_that_is_done_stalls_nothing_and_records_no_event() -> None:
    bench = Bench()
    bench.clock.stalled(bench.copy(0, None, 5.0), is_load=True)
    assert bench.device.log == []


def test_measurements_of_a_forward_without_a_backward_are_read_every_128() -> None:
    bench = Bench()
    for _ in range(127):
        bench.copy(1000, 0.0, 10.0, is_out=True)
    assert bench.counters.copy_us == 0.0
    bench.copy(1000, 0.0, 10.0, is_out=True)
    assert bench.counters.copy_us == 1280.0


def test_a_recording_gives_every_copy_and_stall_by_its_start() -> None:
    bench = Bench()
    assert bench.clock.stop_recording() == []
    bench.copy(100, 0.0, 1.0)
    bench.clock.read_finished()  # 100 bytes per microsecond
    bench.device.now_us = 50.0
    bench.clock.start_recording()
    bench.device.run()
    out = bench.copy(1000, 60.0, None, is_out=True)
    bench.stall(out, at_us=70.0, end_us=80.0, is_load=False)
    bench.stall(bench.copy(0, None, None), at_us=95.0, end_us=90.0, is_load=True)  # it came in time: no stall
    bench.copy(500, None, 100.0)  # not timed: its start follows from the rate
    assert bench.clock.stop_recording() == [
        LinkSpan(track="copy out", start_us=10.0, end_us=30.0, nbytes=1000),
        LinkSpan(track="stall", start_us=20.0, end_us=30.0, nbytes=0),
        LinkSpan(track="copy back", start_us=40.0, end_us=40.0, nbytes=0),
        LinkSpan(track="copy back", start_us=45.0, end_us=50.0, nbytes=500),
    ]
