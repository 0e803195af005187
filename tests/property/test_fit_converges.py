"""``fit_memory`` on machines that differ from their profile: see ``true_machine``. Seeds are numbers, so a failure has a name."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from hyper_parallel.planner import fit, solve

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from planner_core.true_machine import TrueMachine

SEEDS = (0, 6, 15, 29, 38, 40)
NOISE = 0.008  # the most by which a measurement of the machine is off
EVENTS = 200_000  # a sixth of the usual search: the blocks are few


@pytest.mark.parametrize("seed", SEEDS)
def test_predictions_converge_and_the_answer_is_as_good_as_what_was_measured(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = TrueMachine(seed)
    budget = machine.budget()
    monkeypatch.setattr(solve, "MOST_EVENTS", EVENTS)
    monkeypatch.setattr(fit, "planner_backend", lambda: machine)
    applied = fit.fit_memory(None, lambda: None, budget)
    assert applied.measured.peak_bytes <= budget
    assert applied.plan.predicted_peak_bytes <= budget
    assert applied.plan.predicted_step_seconds == pytest.approx(applied.measured.step_seconds, rel=0.03)
    fitting = [row for row in applied.history if row["measured_peak_bytes"] <= budget]
    fastest = min(row["measured_step_seconds"] for row in fitting)
    assert applied.measured.step_seconds <= (1.01 + NOISE) * fastest
    errors = [
        row["predicted_step_seconds"] / row["measured_step_seconds"] - 1 for row in applied.history if "way" not in row
    ]
    if len(errors) > 1:
        assert abs(errors[-1]) <= max(abs(errors[0]), 0.03)
    large = [error > 0 for error in errors if abs(error) > 0.03]
    is_swinging = len(large) > 2 and all(one != other for one, other in itertools.pairwise(large))
    assert not is_swinging, errors
