"""The demo's decisions, without a framework: whose memory is counted, and what becomes of a plan that does not fit."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel.backends import demo_training
from hyper_parallel.backends.demo_training import SIZES, DemoPlan, DemoTraining
from hyper_parallel.errors import BudgetTooSmallError, HyperParallelError
from hyper_parallel.planner.planning import plan_memory
from tests.unit.planner_core.small import small_profile


def training(*, has_accelerator: bool, frees_host_memory: bool, num_threads: int | None = None) -> DemoTraining:
    framework: Any = SimpleNamespace(
        observed=SimpleNamespace(tree=None),
        sizes=SIZES,
        has_accelerator=lambda: has_accelerator,
        frees_host_memory=frees_host_memory,
        fitting_size=lambda: "host",
        built=lambda size: (None, lambda: "step"),
        num_threads=lambda: num_threads,
    )
    return DemoTraining(framework)


@pytest.mark.parametrize(
    ("has_accelerator", "frees_host_memory", "counted"),
    [
        (False, True, (True, False)),
        (False, False, (False, True)),
        (True, True, (False, False)),
        (True, False, (False, False)),
    ],
)
def test_whose_memory_is_counted(has_accelerator: bool, frees_host_memory: bool, counted: tuple[bool, bool]) -> None:
    made = training(has_accelerator=has_accelerator, frees_host_memory=frees_host_memory)
    assert (made.counts_resident_memory, made.counts_simulated_memory) == counted


def test_the_size_is_the_one_that_is_asked_for() -> None:
    made = training(has_accelerator=False, frees_host_memory=True)
    assert made.size(None) is SIZES["host"]
    assert made.size("tiny") is SIZES["tiny"]


def test_a_plan_that_cannot_be_kept_is_an_error_on_an_accelerator_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **keywords: Any) -> None:
        assert keywords["plan"] is planned.plan
        raise BudgetTooSmallError("too small")

    profile = small_profile()
    planned = DemoPlan(profile=profile, plan=plan_memory(profile, 2**40))
    monkeypatch.setattr(demo_training, "fit_memory", refuse)
    assert training(has_accelerator=False, frees_host_memory=False)._fitted(None, None, planned) is planned.plan  # type: ignore[arg-type]
    with pytest.raises(BudgetTooSmallError):
        training(has_accelerator=True, frees_host_memory=False)._fitted(None, None, planned)  # type: ignore[arg-type]


def test_ops_that_the_simulation_slowed_count_with_their_real_time() -> None:
    found = demo_training._of_real_time(0.5, 2.0)
    assert (found.work_scale, found.issue_scale, found.region_scale) == (0.25, 0.25, 0.25)
    assert (found.swap_scale, found.link_scale) == (1.0, 1.0), "the disk was timed as it is"


@pytest.mark.parametrize("wrong", ["", "swap"])
def test_ways_are_timed_in_turns_and_their_gradients_compared(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    ran: list[str] = []

    class Way:
        def __init__(self, *args: Any) -> None:
            ran.append(args[3])

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

    class Observer:
        def __init__(self, *_: Any) -> None:
            pass

        def time_one(self, *, after: Any) -> float:
            after(ran[-1])
            return float(len(ran))

    class Gradients:
        def __init__(self, *_: Any) -> None:
            self.fingerprint = ""

        def __call__(self, way: str) -> None:
            self.fingerprint = "other" if way == wrong else "one"

    for name, fake in (("in_one_way", Way), ("StepObserver", Observer), ("FirstGradients", Gradients)):
        monkeypatch.setattr(demo_training, name, fake)
    monkeypatch.setattr(demo_training, "find_observed_blocks", lambda *_: [])
    monkeypatch.setattr(demo_training, "configure", lambda **_: None)
    made = training(has_accelerator=False, frees_host_memory=True)

    def time() -> dict[str, list[float]]:
        times = made.time_in_turns(SIZES["tiny"], disk_path="/", rounds=2, plan=None)  # type: ignore[arg-type]
        assert times.processor_seconds == {}, "it is not known how many threads compute"
        return times.seconds

    if wrong:
        with pytest.raises(HyperParallelError, match=r"^the gradients of swap differ from those of none$"):
            time()
    else:
        assert time() == {"none": [1.0, 5.0], "recompute": [2.0, 6.0], "swap": [3.0, 7.0], "auto": [4.0, 8.0]}
    assert ran == ["none", "recompute", "swap", "auto"] * 2


def test_where_the_threads_are_known_processor_time_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(demo_training, "in_one_way", lambda *args: contextlib.nullcontext(ran.append(args[3])))
    monkeypatch.setattr(demo_training, "StepObserver", lambda *_: None)
    monkeypatch.setattr(demo_training, "FirstGradients", lambda *_: _SameGradients())
    monkeypatch.setattr(demo_training, "find_observed_blocks", lambda *_: [])
    monkeypatch.setattr(demo_training, "configure", lambda **_: None)
    steps: list[None] = []
    made = training(has_accelerator=False, frees_host_memory=True, num_threads=2)
    made._on_step = lambda: steps.append(None)
    times = made.time_in_turns(SIZES["tiny"], disk_path="/", rounds=2, plan=None)  # type: ignore[arg-type]
    assert {way: len(found) for way, found in times.processor_seconds.items()} == dict.fromkeys(times.seconds, 2)
    assert len(steps) == 2 * len(ran) == 16, "one step that does not count before each that is timed"


class _SameGradients:
    fingerprint = "one"

    def __call__(self, result: str) -> None:
        assert result == "step"
