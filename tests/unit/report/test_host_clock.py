"""When a machine's times are not worth comparing, and what is said of processor time in their place."""

from __future__ import annotations

import torch

from hyper_parallel.backends.step_observation.host_clock import HostSeconds, are_contended, timed
from hyper_parallel.backends.torch.resident_planning import ResidentMeter
from hyper_parallel.cli.demo import _processor_notes


def test_a_step_that_waited_for_a_processor_for_a_fifth_of_its_time_is_contended() -> None:
    quiet = HostSeconds(wall=1.0, processor=0.9, waited=0.05)
    busy = HostSeconds(wall=9.0, processor=0.9, waited=6.0)
    assert not are_contended([quiet, quiet])
    assert are_contended([quiet, busy])


def test_a_step_is_timed_by_all_clocks() -> None:
    ran = []
    took = timed(lambda: ran.append(sum(range(100_000))), 2)
    assert ran
    assert took.wall > 0
    assert took.processor >= 0
    assert took.waited >= 0
    assert HostSeconds(3.0, 2.0, 1.0).since(HostSeconds(1.0, 1.0, 1.0)) == HostSeconds(2.0, 1.0, 0.0)


def test_the_resident_meter_reads_the_clock_that_says_something() -> None:
    for is_contended in (False, True):
        meter = ResidentMeter(0, is_contended=is_contended)
        now = HostSeconds.now(torch.get_num_threads())
        other = now.wall if is_contended else now.processor
        mine = now.processor if is_contended else now.wall
        assert abs(meter.mark() - mine) < abs(meter.mark() - other)


def test_what_the_process_takes_without_the_model_is_left_out() -> None:
    all_of_it, some = ResidentMeter(0), ResidentMeter(2**20)
    assert all_of_it.active_bytes() > 2**20
    assert 0 < some.peak_bytes() < all_of_it.peak_bytes()
    assert ResidentMeter(2**50).active_bytes() == 0


def test_processor_time_is_said_beside_the_plain_step_of_the_same_round() -> None:
    seconds = {"none": [1.0, 2.0, 1.0], "recompute": [1.3, 2.6, 1.4], "swap": [1.2] * 3, "auto": [1.1, 2.2, 1.05]}
    (note,) = _processor_notes(seconds)
    assert "recompute +30% (+30% to +40%)" in note
    assert "auto +10% (+5% to +10%)" in note
    assert _processor_notes({}) == ()
