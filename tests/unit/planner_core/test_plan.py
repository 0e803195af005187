"""Plans: what they promise, and that they are values."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Block, FarCaps, Link, Measured, Profile, Segment
from hyper_parallel.planner.solve import MOST_EVENTS, Solver
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.moments import MomentBytes

from .small import KIND, SETTINGS, small_profile
from .stack_profile import GIB, stack_profile

BASE, INPUT, VALUE, TRANSIENT = 100, 3, 10, 5
ALONE = BASE + 2 * (INPUT + VALUE) + TRANSIENT
NO_LINK = Link(out_bytes_per_second=0.001, in_bytes_per_second=0.001)


@pytest.fixture(scope="module")
def stack() -> Profile:
    return stack_profile("8k")


@pytest.fixture(scope="module")
def stack_plan(stack: Profile) -> Plan:
    return hp.plan_memory(stack, stack.base.total + 5 * GIB, effort=0.2)


def test_a_step_that_fits_is_left_alone() -> None:
    plan = hp.plan_memory(small_profile(), ALONE)
    assert plan.does_nothing
    assert plan.recipes == ()
    assert [block.recipe for block in plan.blocks] == [None, None]
    assert plan.predicted_peak_bytes == ALONE
    assert plan.predicted.swapped_out_bytes == 0
    assert "the step fits: nothing is done" in plan.summary()


def test_one_byte_less_is_recomputed_where_nothing_can_leave() -> None:
    plan = hp.plan_memory(small_profile(link=NO_LINK), ALONE - 1)
    assert not plan.does_nothing
    # Block 0 is replayed after block 1 is gone; block 1's own replay would hold as much as leaving it alone.
    first, last = plan.blocks
    assert last.recipe is None
    recipe = plan.recipe_of(first)
    assert recipe is not None
    (region,) = recipe.regions
    assert region.module == ""
    assert region.fate_of("f", "default", 0) is Fate.RECOMPUTE
    assert plan.predicted_peak_bytes == BASE + 2 * INPUT + VALUE + TRANSIENT
    assert plan.predicted_step_seconds == pytest.approx(13.0)
    assert (plan.predicted.compute_seconds, plan.predicted.replay_seconds) == (pytest.approx(12.0), pytest.approx(1.0))


def test_with_a_fast_link_it_leaves_instead() -> None:
    fast = Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    settings = dataclasses.replace(SETTINGS, window_bytes=0)
    plan = hp.plan_memory(small_profile(link=fast, engine=settings), BASE + 2 * INPUT + VALUE + TRANSIENT)
    recipe = plan.recipe_of(plan.blocks[0])
    assert recipe is not None
    assert recipe.regions[0].fate_of("f", "default", 0) is Fate.SWAP
    assert plan.predicted_step_seconds == pytest.approx(12.0, abs=1e-3)


def test_the_hosts_cap_is_kept() -> None:
    fast = Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6)
    settings = dataclasses.replace(SETTINGS, window_bytes=0)
    profile = small_profile(blocks=4, link=fast, engine=settings, far=FarCaps(host_bytes=12))
    plan = hp.plan_memory(profile, BASE + 4 * INPUT + VALUE + TRANSIENT)
    assert plan.predicted.host_bytes <= 12
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_nothing_fits_and_the_error_says_what_is_there() -> None:
    text = (
        r"plan_memory: 101 B cannot hold this step; the smallest peak found is 118 B, at the .* of blocks.\d "
        r"\(weights 60 B, gradients 30 B, optimizer 8 B, other 2 B, .*working set .*\). Raise the budget"
    )
    with pytest.raises(BudgetTooSmallError, match=text) as caught:
        hp.plan_memory(small_profile(engine=dataclasses.replace(SETTINGS, window_bytes=0, prefetch_bytes=0)), 101)
    assert caught.value.smallest_peak_bytes == BASE + INPUT + VALUE + TRANSIENT


def test_the_smallest_peak_of_the_error_is_reachable() -> None:
    profile = small_profile(engine=dataclasses.replace(SETTINGS, window_bytes=0, prefetch_bytes=0))
    assert hp.plan_memory(profile, 118).predicted_peak_bytes == 118


@pytest.mark.parametrize("given", ["profile.json", None, 3])
def test_a_profile_is_a_profile(given: object) -> None:
    with pytest.raises(TypeError, match=r"plan_memory: expected a Profile, got .*; make one with profile_memory"):
        hp.plan_memory(given, "1GiB")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1.0, True, "hard", float("nan"), 101])
def test_an_effort_is_a_number(given: Any) -> None:
    with pytest.raises(ValueError, match=r"plan_memory: effort is a number above 0 and up to 100, got"):
        hp.plan_memory(small_profile(), "1GiB", effort=given)


# ---------------------------------------------------------------------- the benchmark's stack


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "gib", "hand"),
    [
        ("8k", 3.8, 1.138),
        ("8k", 5.1, 1.124),
        ("8k", 9.1, 1.074),
        ("8k", 15.4, 1.019),
        ("32k", 7.5, 1.064),
        ("32k", 13.6, 1.033),
    ],
)
def test_no_slower_than_the_hand_written_policy_with_that_memory(case: str, gib: float, hand: float) -> None:
    # ``hand``: what the simulator says of that policy, see test_stack_h200.
    profile = stack_profile(case)
    solver = Solver(StepSimulator(profile))
    budget = profile.base.weights + profile.base.gradients + int(gib * GIB)
    answer = solver.solve(budget, effort=0.5)
    assert answer.step.peak_bytes <= budget
    assert answer.step.step_seconds / solver.untouched().step.step_seconds <= hand


def test_prediction_and_budget(stack: Profile, stack_plan: Plan) -> None:
    assert stack_plan.predicted_peak_bytes <= stack_plan.budget_bytes
    assert stack_plan.predicted_peak_bytes == sum(stack_plan.predicted.peak_parts.values())
    parts = stack_plan.predicted
    assert parts.step_seconds == pytest.approx(parts.compute_seconds + parts.replay_seconds + parts.exposed_seconds)
    assert stack_plan.untouched.peak_bytes == stack.measured.peak_bytes
    assert stack_plan.untouched.step_seconds == pytest.approx(stack.measured.step_seconds)


def test_more_memory_is_never_slower(stack_plan: Plan) -> None:
    less, more = stack_plan.what_if
    assert less.budget_bytes == int(stack_plan.budget_bytes * 0.9)
    assert more.budget_bytes == int(stack_plan.budget_bytes * 1.1)
    assert less.step_seconds is None or less.step_seconds >= stack_plan.predicted_step_seconds
    assert more.step_seconds is not None
    assert more.step_seconds <= stack_plan.predicted_step_seconds


def test_every_op_has_a_fate_and_a_reason(stack: Profile, stack_plan: Plan) -> None:
    names = [op.name for op in stack.kinds[0].ops]
    for block in stack_plan.blocks:
        assert block.reason
        recipe = stack_plan.recipe_of(block)
        if recipe is not None:
            assert [op.name for region in recipe.regions for op in region.ops] == names
            assert all(op.reason for region in recipe.regions for op in region.ops)


def test_occurrences_count_from_the_regions_start(stack: Profile) -> None:
    tight = hp.plan_memory(stack, stack.base.total + int(3.5 * GIB), effort=0.2)
    recipe = next(recipe for recipe in tight.recipes if len(recipe.regions) == 2)
    found = {
        (region.module, op.module): op.occurrence for region in recipe.regions for op in region.ops if op.name == "mm"
    }
    assert found == {
        ("attention", "attention.qkv"): 0,
        ("attention", "attention.o"): 1,
        ("mlp", "mlp.gate"): 0,
        ("mlp", "mlp.up"): 1,
        ("mlp", "mlp.down"): 2,
    }


def test_the_callers_own_batch_does_not_leave(stack_plan: Plan) -> None:
    recipe = stack_plan.recipe_of(stack_plan.blocks[0])
    assert recipe is not None
    assert recipe.regions[0].input_fate is Fate.SAVE


def test_the_same_question_has_the_same_answer(stack: Profile, stack_plan: Plan) -> None:
    assert hp.plan_memory(stack, stack_plan.budget_bytes, effort=0.2) == stack_plan


def test_a_file_gives_back_the_plan(stack_plan: Plan, tmp_path: Path) -> None:
    stack_plan.save(tmp_path / "plan.json")
    loaded = hp.Plan.load(tmp_path / "plan.json")
    assert loaded == stack_plan
    assert stack_plan.diff(loaded) == ()


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    hp.plan_memory(small_profile(link=NO_LINK), ALONE - 1).save(target)
    data = json.loads(target.read_text())
    data["recipes"][0]["regions"][0]["ops"][0]["fate"] = "burn"
    target.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"ops\[0\].fate: expected one of save, swap, recompute, got 'burn'"):
        Plan.load(target)
    data["recipes"] = []
    target.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"blocks.0 follows recipe 0; there are 0"):
        Plan.load(target)


def test_a_profile_is_no_plan(tmp_path: Path) -> None:
    small_profile().save(tmp_path / "profile.json")
    with pytest.raises(
        PlanError, match=r"schema is 'hyper_parallel.profile/3', this version reads 'hyper_parallel.plan/2'"
    ):
        Plan.load(tmp_path / "profile.json")


def test_a_plan_refuses_another_model() -> None:
    plan = hp.plan_memory(small_profile(), ALONE)
    plan.check_model("paper")
    with pytest.raises(
        PlanError, match=r"Plan: cannot be applied to GPT, because it was made for another one \(fingerprint paper"
    ):
        plan.check_model("cardboard", model="GPT")


def test_differences_are_said_once_for_all_blocks() -> None:
    profile = small_profile(blocks=6, link=NO_LINK)
    alone = hp.plan_memory(profile, 10_000)
    tight = hp.plan_memory(profile, BASE + 6 * INPUT + VALUE + TRANSIENT)
    lines = alone.diff(tight)
    assert lines[0] == "budget: 9.77 KiB -> 133 B"
    assert "regions: left alone -> whole in 5 blocks (blocks.0 .. blocks.4)" in lines
    assert lines[-1] == "predicted: 183 B, 36000.0 ms -> 133 B, 41000.0 ms"
    assert not any("f#0" in line for line in lines)


def test_one_fate_that_differs(stack: Profile, stack_plan: Plan) -> None:
    at = next(at for at, block in enumerate(stack_plan.blocks) if block.recipe is not None)
    recipe = stack_plan.recipe_of(stack_plan.blocks[at])
    assert recipe is not None
    region = recipe.regions[0]
    flipped = dataclasses.replace(region.ops[0], fate=Fate.SAVE if region.ops[0].fate is not Fate.SAVE else Fate.SWAP)
    other_region = dataclasses.replace(region, ops=(flipped, *region.ops[1:]))
    other_recipe = dataclasses.replace(recipe, regions=(other_region, *recipe.regions[1:]))
    blocks = list(stack_plan.blocks)
    blocks[at] = dataclasses.replace(blocks[at], recipe=len(stack_plan.recipes))
    other = dataclasses.replace(stack_plan, blocks=tuple(blocks), recipes=(*stack_plan.recipes, other_recipe))
    fate, label = region.ops[0].fate.value, "attention.norm::_fused_rms_norm#0"
    assert stack_plan.diff(other) == (f"{label}: {fate} -> {flipped.fate.value} in {blocks[at].name}",)


# ---------------------------------------------------------------------- what was measured


def test_bytes_that_the_simulator_does_not_explain_are_added() -> None:
    profile = small_profile(measured=Measured(step_seconds=24.0, peak_bytes=ALONE + 7))
    plan = hp.plan_memory(profile, ALONE + 7)
    assert plan.does_nothing
    assert plan.predicted_peak_bytes == ALONE + 7
    assert plan.predicted_step_seconds == pytest.approx(24.0)
    assert not hp.plan_memory(profile, ALONE).does_nothing


def test_a_step_that_was_measured_to_fit_fits() -> None:
    profile = small_profile(measured=Measured(step_seconds=12.0, peak_bytes=ALONE - 6))
    plan = hp.plan_memory(profile, ALONE - 6)
    assert plan.does_nothing
    assert plan.predicted_peak_bytes == ALONE - 6
    assert hp.plan_memory(profile, ALONE - 7).corrections.moments == MomentBytes()


def test_a_step_that_did_not_fit_calibrates_nothing() -> None:
    profile = small_profile(measured=Measured(step_seconds=99.0, peak_bytes=7, under="everything recomputed"))
    assert hp.plan_memory(profile, ALONE).corrections == Corrections()


def test_a_measured_miss_is_planned_for() -> None:
    profile = small_profile(link=NO_LINK)
    first = hp.plan_memory(profile, ALONE - 1)
    learned = first.corrections.after(
        first, measured_peak_bytes=first.predicted_peak_bytes + 9, measured_step_seconds=26.0
    )
    assert learned == Corrections.of_work(2.0, moments=MomentBytes(blocks_backward=9))
    with pytest.raises(BudgetTooSmallError, match=r"cannot hold this step"):
        hp.plan_memory(profile, first.predicted_peak_bytes, corrections=learned)
    again = hp.plan_memory(profile, first.predicted_peak_bytes + 9, corrections=learned)
    assert again.predicted_peak_bytes == first.predicted_peak_bytes + 9
    assert again.predicted_step_seconds == pytest.approx(26.0)


def test_notes_on_reserved_and_pinned_memory() -> None:
    link = Link(out_bytes_per_second=1e6, in_bytes_per_second=1e6, pin_seconds_per_byte=0.5)
    measured = Measured(step_seconds=12.0, peak_bytes=ALONE, reserved_bytes=ALONE + 2048)
    settings = dataclasses.replace(SETTINGS, window_bytes=0)
    plan = hp.plan_memory(small_profile(link=link, measured=measured, engine=settings), ALONE - 1)
    assert plan.notes[0] == "the allocator reserved 2.00 KiB beyond the active bytes when this was profiled"
    assert (
        plan.notes[1]
        == f"pinning {plan.predicted.host_bytes} B of host memory takes {plan.predicted.host_bytes / 2:.1f} s, once"
    )


# ---------------------------------------------------------------------- size


@pytest.mark.slow
def test_a_hundred_layers_cost_a_bounded_search() -> None:
    stack = stack_profile("8k")
    blocks = tuple(Block(name=f"layers.{at}", kind=0, input_bytes=128 * 2**20) for at in range(100))
    profile = dataclasses.replace(stack, blocks=blocks, far=FarCaps(host_bytes=400 * GIB))
    solver = Solver(StepSimulator(profile))
    alone = solver.untouched().step
    answer = solver.solve(profile.base.total + (alone.peak_bytes - profile.base.total) // 5)
    assert answer.step.peak_bytes <= profile.base.total + (alone.peak_bytes - profile.base.total) // 5
    assert answer.step.step_seconds < 1.15 * alone.step_seconds
    assert solver.simulator.cost < 1.2 * MOST_EVENTS


def test_two_kinds_and_a_head_that_is_the_peak() -> None:
    heavy = dataclasses.replace(
        KIND, name="Heavy", ops=(dataclasses.replace(KIND.ops[0], output_bytes=30, kept_bytes=30), KIND.ops[1])
    )
    blocks = tuple(Block(name=f"blocks.{at}", kind=at % 2, input_bytes=3) for at in range(4))
    profile = dataclasses.replace(
        small_profile(link=NO_LINK),
        kinds=(KIND, heavy),
        blocks=blocks,
        measured=Measured(step_seconds=1.0, peak_bytes=1, under="everything recomputed"),
        epilogue=Segment(forward_transient_bytes=60, kept_bytes=20),
    )
    budget = BASE + 4 * INPUT + 60
    plan = hp.plan_memory(profile, budget)
    assert plan.predicted.peak_where == "forward of the head and loss"
    assert plan.predicted_peak_bytes == budget
    assert plan.predicted.replay_seconds == pytest.approx(4.0)


def test_a_module_that_is_called_twice_has_one_fate() -> None:
    blocks = tuple(Block(name=f"blocks.{at % 2}", kind=0, input_bytes=3) for at in range(4))
    profile = dataclasses.replace(small_profile(blocks=4, link=NO_LINK), blocks=blocks)
    for budget in (BASE + 4 * INPUT + VALUE + TRANSIENT, BASE + 4 * INPUT + 3 * VALUE + TRANSIENT):
        plan = hp.plan_memory(profile, budget)
        assert not plan.does_nothing
        assert plan.blocks[0] == plan.blocks[2]
        assert plan.blocks[1] == plan.blocks[3]


def test_a_module_whose_calls_differ_is_left_alone() -> None:
    other = dataclasses.replace(
        KIND, name="Other", ops=(*KIND.ops, dataclasses.replace(KIND.ops[1], inputs=(1,), occurrence=1))
    )
    blocks = tuple(Block(name=f"blocks.{at // 2}", kind=at == 1, input_bytes=3) for at in range(4))
    profile = dataclasses.replace(small_profile(blocks=4, link=NO_LINK), kinds=(KIND, other), blocks=blocks)
    plan = hp.plan_memory(profile, BASE + 4 * INPUT + 3 * VALUE + TRANSIENT)
    assert [block.recipe is None for block in plan.blocks[:2]] == [True, True]
    assert plan.recipe_of(plan.blocks[2]) is not None


def test_a_plan_is_compared_with_plans_only() -> None:
    plan = hp.plan_memory(small_profile(), 10**9)
    with pytest.raises(TypeError, match=r"Plan\.diff: expected a Plan, got str; read one with Plan\.load\(path\)"):
        plan.diff("plan.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["nowhere/plan.json", "."])
def test_a_file_that_cannot_be_written_has_the_name_that_was_given(tmp_path: Path, where: str) -> None:
    plan = hp.plan_memory(small_profile(), 10**9)
    target = tmp_path / where
    with pytest.raises(OSError, match=rf"{re.escape(repr(str(target)))}$"):
        plan.save(target)
    assert list(tmp_path.iterdir()) == []
