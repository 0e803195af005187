"""What swapping costs where the processor that computes makes the copies: no plan may take it for free."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from hyper_parallel.backends.torch import resident_planning
from hyper_parallel.backends.torch.resident_planning import (
    ResidentMeter,
    ResidentProfile,
    fit_resident,
    with_copy_cost,
    within,
)
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.by_hand import swapped_choices
from hyper_parallel.planner.fit_progress import MOST_SECONDS, FitProgress
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import Link, Profile
from hyper_parallel.planner.step_simulator import StepSimulator

from .small import KIND, F, small_profile

FAST = Link(out_bytes_per_second=1e3, in_bytes_per_second=1e3)
BUDGET = 130
WIDE = 140


def profile(blocks: int = 4) -> Profile:
    """Making ``f`` again takes a tenth of a second for each block; a copy hides behind compute."""
    kind = dataclasses.replace(KIND, ops=(dataclasses.replace(F, seconds=0.1), KIND.ops[1]))
    return small_profile(blocks=blocks, kind=kind, link=FAST)


def swapped_seconds(of: Profile) -> float:
    return StepSimulator(of).simulate(swapped_choices(of), of.engine).step_seconds


def test_what_the_swapped_step_took_is_what_its_simulation_takes() -> None:
    slow = with_copy_cost(profile(), swapped_seconds(profile()) + 2.0)
    assert slow.link.compute_seconds_per_byte > 0
    assert swapped_seconds(slow) == pytest.approx(swapped_seconds(profile()) + 2.0)


def test_a_swapped_step_that_was_as_fast_as_simulated_adds_nothing() -> None:
    assert with_copy_cost(profile(), 0.5 * swapped_seconds(profile())) == profile()


def test_a_plan_swaps_where_that_is_free_and_recomputes_where_it_is_not() -> None:
    """The mistake that this was made for: every value swapped, because copies to a file seemed to cost nothing."""
    free = plan_memory(profile(), BUDGET, effort=0.2)
    costly = plan_memory(with_copy_cost(profile(), swapped_seconds(profile()) + 8.0), BUDGET, effort=0.2)
    assert free.predicted.swapped_out_bytes > 0
    assert free.predicted.replay_seconds < costly.predicted.replay_seconds
    assert costly.predicted.swapped_out_bytes < free.predicted.swapped_out_bytes


def test_a_plan_leaves_some_of_the_budget_for_the_next_process() -> None:
    assert 0.9 * 10**9 < within(10**9) < 10**9


class Answered:
    """What a fit answers with, here."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def remove(self) -> None:
        self.is_removed = True


def test_a_fit_begins_with_a_plan_that_leaves_the_spare_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for the whole budget, the first plan was over the fit's own limit, and a busy machine had no time for another."""
    seen: dict[str, Any] = {}

    def fitted(backend: Any, model: Any, step: Any, budget: int, **given: Any) -> Answered:
        seen.update(given, budget=budget)
        return Answered(given["plan"])

    monkeypatch.setattr(resident_planning, "fit_with_backend", fitted)
    meter = ResidentMeter(0)
    resident = ResidentProfile(profile=profile(), meter=meter)
    asked = plan_memory(profile(), WIDE, effort=0.2)
    answer = fit_resident(nn.Linear(1, 1), lambda: None, resident, asked, attempts=3, steps=1)
    assert seen["budget"] == within(WIDE) < WIDE
    assert seen["plan"].predicted_peak_bytes <= within(WIDE)
    assert seen["clock"] == meter.mark, "what a fit may take is counted by the clock of its trials"
    assert answer.budget_bytes == WIDE
    roomy = dataclasses.replace(asked, budget_bytes=150)
    fit_resident(nn.Linear(1, 1), lambda: None, resident, roomy, attempts=3, steps=1)
    assert seen["plan"].predicted_peak_bytes <= 0.94 * within(150), "peaks come out a little higher than predicted"


def test_where_no_measured_plan_keeps_the_budget_the_predicted_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Answered:
        raise BudgetTooSmallError("not kept")

    monkeypatch.setattr(resident_planning, "fit_with_backend", refused)
    asked = plan_memory(profile(), WIDE, effort=0.2)
    resident = ResidentProfile(profile=profile(), meter=ResidentMeter(0))
    answer = fit_resident(nn.Linear(1, 1), lambda: None, resident, asked, attempts=3, steps=1)
    assert answer.blocks == asked.blocks
    assert "no measured plan kept the budget: not kept" in answer.notes


def test_a_system_without_new_peaks_keeps_the_predicted_plan() -> None:
    asked = plan_memory(profile(), WIDE, effort=0.2)
    resident = ResidentProfile(profile=profile(), meter=None)
    assert fit_resident(nn.Linear(1, 1), lambda: None, resident, asked, attempts=3, steps=1) is asked


def test_the_time_of_a_fit_is_counted_by_the_clock_that_it_is_given() -> None:
    now = [0.0]
    progress = FitProgress(is_first_rank=True, clock=lambda: now[0])
    with progress:
        progress.set_step(0.5)
        assert not progress.is_time_over()
        now[0] = MOST_SECONDS + 1
        assert progress.is_time_over()
