"""Budgets that a wrapper by hand meets are met, also where the simulation says that nothing does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import nn

import hyper_parallel as hp
from hyper_parallel.cli.command_line import main
from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.integrations.treatment import apply
from hyper_parallel.planner.simple_plans import RECOMPUTED, RECOMPUTED_SWAPPED, SWAPPED, SimplePlan, simple_plan
from hyper_parallel.testing import simulated_accelerator

from .fused import encoder, fused
from .models import Step, assert_same, gradients, transformer, tree_of


def peak_under(model: nn.Module, step: Step, what: str) -> int:
    """The peak of a step under a treatment by hand, with gradients in place."""
    with simulated_accelerator() as sim, apply(model, what):
        step()
        step()
        sim.reset_peak()
        step()
        peak = sim.peak_bytes
    model.zero_grad()
    return peak


def test_a_budget_that_swap_wrapper_on_every_block_meets_is_not_refused(tmp_path: Path) -> None:
    """The encoder's layers keep less while they are swapped than the smallest searched plan needs."""
    model, step = encoder()
    wanted, tree = gradients(model, step), tree_of(model)
    budget = peak_under(model, step, "swap")
    with simulated_accelerator() as sim:
        profile = hp.profile_memory(model, step, steps=1)
        with pytest.raises(BudgetTooSmallError):
            hp.plan_memory(profile, budget, effort=0.2)
        applied = hp.fit_memory(model, step, budget, profile=profile, steps=1)
        assert applied.measured.peak_bytes == applied.plan.predicted_peak_bytes <= budget
        assert [attempt["way"] for attempt in applied.history] == [
            RECOMPUTED.name,
            RECOMPUTED_SWAPPED.name,
            SWAPPED.name,
        ]
        step()
        sim.reset_peak()
        step()
        assert sim.peak_bytes <= budget
        assert_same(gradients(model, step), wanted)
        applied.report(tmp_path / "report.txt")
        applied.remove()
    assert tree_of(model) == tree
    assert "whatever it saves for backward is swapped" in (tmp_path / "report.txt").read_text()


def test_a_budget_that_checkpoint_on_every_block_meets_is_not_refused() -> None:
    """Bytes of the plain step that the simulation cannot explain are gone when fused blocks are recomputed."""
    model, step = fused()
    wanted = gradients(model, step)
    budget = peak_under(model, step, "recompute")
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        unexplained = dataclasses.replace(profile.measured, peak_bytes=profile.measured.peak_bytes + 400_000)
        profile = dataclasses.replace(profile, measured=unexplained)
        with pytest.raises(BudgetTooSmallError):
            hp.plan_memory(profile, budget, effort=0.2)
        with hp.fit_memory(model, step, budget, profile=profile, steps=1) as applied:
            assert [attempt["way"] for attempt in applied.history] == [RECOMPUTED.name]
            assert applied.measured.peak_bytes <= budget
            assert_same(gradients(model, step), wanted)


def test_a_refusal_names_the_smallest_measured_peak_and_its_parts() -> None:
    model, step = encoder()
    least, tree = peak_under(model, step, "swap"), tree_of(model)
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        with pytest.raises(
            BudgetTooSmallError, match=r"measured with everything that blocks save swapped \("
        ) as caught:
            hp.fit_memory(model, step, least - 1, profile=profile, steps=1)
    assert caught.value.smallest_peak_bytes == least
    assert f"activations {show_bytes(least - profile.base.total)}" in str(caught.value)
    assert tree_of(model) == tree


@pytest.mark.parametrize("way", [RECOMPUTED, RECOMPUTED_SWAPPED, SWAPPED], ids=lambda way: way.name)
def test_a_simple_plan_is_saved_loaded_explained_compared_and_applied(
    way: SimplePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, step = transformer()
    wanted, tree = gradients(model, step), tree_of(model)
    with simulated_accelerator() as sim:
        profile = hp.profile_memory(model, step, steps=1)
        plan = simple_plan(profile, 10**6, way)
        plan.save(tmp_path / "plan.json")
        profile.save(tmp_path / "profile.json")
        loaded = hp.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        with hp.apply_plan(model, loaded) as applied:
            before = sim.swapped_bytes
            assert_same(gradients(model, step), wanted)
            assert (sim.swapped_bytes > before) == (way is not RECOMPUTED)
            assert applied.num_regions == 4
    assert tree_of(model) == tree
    assert main(["explain", str(tmp_path / "plan.json"), "--profile", str(tmp_path / "profile.json")]) == 0
    assert way.name in capsys.readouterr().out
    other = simple_plan(profile, 10**6, SWAPPED if way is not SWAPPED else RECOMPUTED)
    assert any("not replayed" in line for line in plan.diff(other))
    assert plan.diff(plan) == ()


def test_where_time_is_simulated_a_searched_plan_that_fits_is_not_compared() -> None:
    model, step = transformer()
    budget = peak_under(model, step, "recompute")
    with simulated_accelerator(), hp.fit_memory(model, step, budget, steps=1) as applied:
        assert not any("way" in attempt for attempt in applied.history)
        assert applied.measured.peak_bytes <= budget
