"""A plan counted by kind of op, on the step that is worked out by hand: f makes 10 bytes per block, g makes 4."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.simple_plans import RECOMPUTED, SWAPPED, SimplePlan, as_measured, simple_plan
from hyper_parallel.planner.totals import op_totals

from .small import small_profile

BLOCKS = 3


def counted(way: SimplePlan) -> dict[str, tuple[int, int, int, int, int]]:
    profile = small_profile(blocks=BLOCKS)
    totals = op_totals(profile, simple_plan(profile, 10**6, way))
    assert {total.reason for total in totals} == {way.name}
    return {
        total.op: (total.count, total.kept_bytes, total.saved_bytes, total.swapped_bytes, total.recomputed_bytes)
        for total in totals
    }


def test_blocks_that_are_recomputed_make_every_output_again() -> None:
    assert counted(RECOMPUTED) == {"f": (BLOCKS, 0, 0, 0, BLOCKS * 10), "g": (BLOCKS, 0, 0, 0, BLOCKS * 4)}


def test_blocks_that_are_swapped_send_away_what_they_keep() -> None:
    assert counted(SWAPPED) == {"f": (BLOCKS, 0, 0, BLOCKS * 10, 0)}


def test_a_step_that_is_left_alone_keeps_what_autograd_keeps() -> None:
    profile = small_profile(blocks=BLOCKS)
    (total,) = op_totals(profile, plan_memory(profile, 10**6))
    assert (total.op, total.kept_bytes, total.total_bytes) == ("f", BLOCKS * 10, BLOCKS * 10)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = simple_plan(small_profile(), 10**6, RECOMPUTED)
    with pytest.raises(PlanError, match="this profile"):
        op_totals(small_profile(model_fingerprint="another"), plan)


def test_a_measured_plan_predicts_what_was_measured_and_its_parts_add_up() -> None:
    profile = small_profile()
    plan = as_measured(simple_plan(profile, 10**6, SWAPPED), profile, peak_bytes=117, step_seconds=2.5)
    predicted = plan.predicted
    assert (predicted.peak_bytes, predicted.step_seconds, plan.budget_bytes) == (117, 2.5, 10**6)
    assert dict(predicted.peak_parts) == {"base": 100, "activations": 17}
    assert plan.notes == ("chosen because it was measured: 117 B, 2500.0 ms",)
