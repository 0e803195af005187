"""More memory is never slower: plans of one profile at growing budgets."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel.planner.by_hand import RECOMPUTED, RECOMPUTED_SWAPPED
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.profile import HostCost, Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from planner_core.stack_profile import stack_profile

MEASURED = Path(__file__).parents[1] / "unit" / "planner_core" / "data" / "stack_8k_h200.json"
BUDGETS = 6


def on_tape(profile: Profile) -> Profile:
    """The same blocks run from tapes, on a host that takes as long as the device."""
    return dataclasses.replace(
        profile,
        kinds=tuple(
            dataclasses.replace(
                kind,
                runs_from_tape=True,
                host_forward_seconds=0.95 * sum(op.seconds for op in kind.ops),
                host_backward_seconds=0.6 * kind.backward_seconds,
            )
            for kind in profile.kinds
        ),
        host=HostCost(
            region_seconds=2e-4,
            region_backward_seconds=1e-4,
            region_op_seconds=2e-6,
            replayed_op_seconds=8e-6,
            swap_out_seconds=6e-5,
            swap_in_seconds=5e-5,
        ),
    )


CASES = {
    "8k": lambda: stack_profile("8k"),
    "32k on tapes": lambda: on_tape(stack_profile("32k")),
    "measured, on tapes": lambda: on_tape(Profile.load(MEASURED)),
}


@pytest.mark.parametrize("case", CASES)
def test_no_plan_is_slower_than_one_with_less_memory(case: str) -> None:
    profile = CASES[case]()
    solver = Solver(StepSimulator(profile))
    by_hand = {
        name: solver.simulate(Solution(choices, profile.engine)).step for name, choices in solver.by_hand.items()
    }
    least = by_hand[RECOMPUTED_SWAPPED].peak_bytes
    most = solver.untouched().step.peak_bytes
    fastest = float("inf")
    for number in range(BUDGETS):
        budget = least + number * (most - least) // BUDGETS
        plan = hp.plan_memory(profile, budget, effort=0.2)
        assert plan.predicted_step_seconds <= 1.01 * fastest, f"{budget} bytes, after less"
        fastest = min(fastest, plan.predicted_step_seconds)
        if by_hand[RECOMPUTED].peak_bytes <= budget:
            scale = plan.corrections.work_scale
            assert plan.predicted_step_seconds <= 1.01 * max(1.0, scale) * by_hand[RECOMPUTED].step_seconds
