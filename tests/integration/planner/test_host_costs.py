"""What the host takes is measured apart from the device: on a device that notes when it is waited for and held."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch.planner import host_costs, profiling
from hyper_parallel.backends.torch.planner.meters import Meter, SimulatedMeter
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.planner.profile import HostCost, Link, Profile
from hyper_parallel.simulation.backend import SimulatedBackend
from hyper_parallel.testing import simulated_accelerator

from .models import transformer

BLOCKS = 3


class _NotingMeter(SimulatedMeter):
    """The simulated device as if it were a real one."""

    is_simulated = False

    def __init__(self, backend: SimulatedBackend) -> None:
        super().__init__(backend.simulation)
        self.waits = 0
        self.held: list[float] = []

    def wait(self) -> None:
        self.waits += 1

    def hold(self, seconds: float) -> None:
        if seconds:
            self.held.append(seconds)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[_NotingMeter]:
    with simulated_accelerator():
        backend = next(one for one in SwapManager().backends.values() if isinstance(one, SimulatedBackend))
        noting = _NotingMeter(backend)
        monkeypatch.setattr(profiling, "meter_for", lambda device, who: noting)
        link = Link(
            out_bytes_per_second=1e9, in_bytes_per_second=1e9
        )  # a real device's is measured with copies of its own
        monkeypatch.setattr(profiling, "measure_link", lambda backend, meter, spans: link)
        yield noting


def profile_of() -> Profile:
    model, step = transformer(BLOCKS)
    return hp.profile_memory(model, step, steps=1)


def test_a_profile_has_what_was_measured_of_the_host(meter: _NotingMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = HostCost(region_seconds=1.0, swap_out_seconds=2.0)
    monkeypatch.setattr(profiling, "host_cost", lambda *args, **kwargs: measured)
    assert profile_of().host == measured


def test_regions_and_swaps_have_a_cost_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, bare, swapping = (1.0, 2.0), (4.0, 7.0), (4.0 + 8 * 0.5, 7.0 + 8 * 0.25)  # eight values are swapped
    monkeypatch.setattr(host_costs, "small_steps", lambda device, meter, ways: [plain, bare, swapping])
    cost = functools.partial(host_costs.host_cost, torch.device("cpu"), cast(Meter, None), ops=10, replayed=5)
    alone, region = [(10.0, 20.0)] * 2, [(10.0 + 3.0 + 5.0, 20.0 + 5.0 + 10.0)] * 2
    assert cost(alone=alone, region=region) == HostCost(
        region_seconds=3.0,
        region_backward_seconds=5.0,
        region_op_seconds=2 * 5.0 / 10,
        replayed_op_seconds=2 * 10.0 / 5,
        swap_out_seconds=0.5,
        swap_in_seconds=0.25,
    )
    unknown = cost(alone=[], region=region)  # the step left alone does not fit
    assert (unknown.region_op_seconds, unknown.replayed_op_seconds, unknown.swap_in_seconds) == (0.0, 0.0, 0.25)
    faster = cost(alone=[(99.0, 99.0)] * 2, region=region)  # a measurement cannot make a cost negative
    assert (faster.region_op_seconds, faster.replayed_op_seconds) == (0.0, 0.0)


def test_ways_take_turns_and_rounds_that_build_tapes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def step(leaves: object, meter: object, run: str) -> tuple[float, float]:
        order.append(run)
        is_late = len(order) > 6  # three rounds of two ways
        return (1.0, 2.0) if is_late else (1000.0, 1000.0)

    monkeypatch.setattr(host_costs, "_small_step", step)
    ways: Any = ["one", "other"]
    assert host_costs.small_steps(torch.device("cpu"), cast(Meter, None), ways) == [(1.0, 2.0), (1.0, 2.0)]
    assert order == ["one", "other"] * 9


def test_the_host_is_timed_on_an_idle_device_and_the_device_behind_work(meter: _NotingMeter) -> None:
    profile_of()
    observed, apart = 2, 2 * BLOCKS  # forward and backward of the one observed block, and of every block
    assert len(meter.held) == observed + apart
    assert all(seconds > 0 for seconds in meter.held)
    idle_trials = 4  # two of regions, and two of blocks left alone
    assert meter.waits >= idle_trials * 2 * BLOCKS


def test_what_the_device_is_waited_for_is_no_time_of_a_block(
    meter: _NotingMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The hook that begins a block's backward runs before the one that ends the block behind it.
    now = [0.0]

    def read() -> float:
        now[0] += 1e-6
        return now[0]

    def wait() -> None:
        now[0] += 1000.0

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(meter, "wait", wait)
    for kind in profile_of().kinds:
        assert 0 < kind.host_forward_seconds < 1000
        assert 0 < kind.host_backward_seconds < 1000


def test_a_simulated_device_is_the_host_and_has_no_cost_beside() -> None:
    with simulated_accelerator():
        profile = profile_of()
    assert profile.host == HostCost()
    assert {(kind.host_forward_seconds, kind.host_backward_seconds) for kind in profile.kinds} == {(0.0, 0.0)}
