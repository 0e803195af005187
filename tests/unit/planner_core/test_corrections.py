"""What measured plans teach: factors of seconds, and bytes by moment."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.calibration import Calibration
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.peak_parts import parts_with_base, shown_parts
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.plan_choices import solution_of
from hyper_parallel.planner.planning import Planning
from hyper_parallel.planner.profile import Link, Measured, Segment
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.step_measure import StepMeasure

from .small import short_choice, small_profile
from .stack_profile import stack_profile
from .true_machine import host_bound

FAST_LINK = Link(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
PROFILE = host_bound(dataclasses.replace(stack_profile("8k"), link=FAST_LINK), layers=4, slow=1.0)
OPS = len(PROFILE.kinds[0].ops)


def everywhere(inputs: str, fates: str) -> Solution:
    return Solution((short_choice(0, inputs, fates),) * len(PROFILE.blocks), PROFILE.engine)


SWAPS = everywhere("w", "w" * OPS)
RECOMPUTES = everywhere("s", "r" * OPS)


def seconds(solution: Solution, corrections: Corrections) -> float:
    return StepSimulator(PROFILE, corrections).simulate(*solution).step_seconds


@pytest.mark.parametrize("factor", ["swap_scale", "region_scale"])
def test_plans_that_differ_in_swaps_and_regions_tell_them_apart(factor: str) -> None:
    """One factor is 1.8 on this machine. Both plans are predicted as they were measured, and the other factor stays near 1."""
    true = Corrections(**{factor: 1.8})
    calibration = Calibration(StepSimulator(PROFILE), Corrections())
    for solution in (SWAPS, RECOMPUTES):
        calibration.add(solution, seconds(solution, true))
    found = calibration.corrections
    assert all(ratio == pytest.approx(1.0, abs=0.01) for ratio in calibration.ratios())
    other = found.region_scale if factor == "swap_scale" else found.swap_scale
    assert abs(getattr(found, factor) - 1) > 3 * abs(other - 1)


def test_a_slow_plan_with_swaps_says_nothing_about_one_without() -> None:
    calibration = Calibration(StepSimulator(PROFILE), Corrections())
    calibration.add(RECOMPUTES, seconds(RECOMPUTES, Corrections()))
    calibration.add(SWAPS, 1.3 * seconds(SWAPS, Corrections()))
    assert seconds(RECOMPUTES, calibration.corrections) == pytest.approx(seconds(RECOMPUTES, Corrections()), rel=0.01)
    assert seconds(SWAPS, calibration.corrections) > 1.2 * seconds(SWAPS, Corrections())


def test_one_odd_measurement_does_not_bend_all_factors() -> None:
    calibration = Calibration(StepSimulator(PROFILE), Corrections())
    good = [SWAPS, RECOMPUTES, everywhere("w", "r" * OPS), everywhere("s", "s" * OPS)]
    for solution in good:
        calibration.add(solution, seconds(solution, Corrections()))
    calibration.add(everywhere("s", "w" * OPS), 1.5 * seconds(everywhere("s", "w" * OPS), Corrections()))
    for solution in good:
        assert seconds(solution, calibration.corrections) == pytest.approx(seconds(solution, Corrections()), rel=0.03)


def measure(peak_bytes: int, step_seconds: float, moments: MomentBytes | None = None) -> StepMeasure:
    return StepMeasure(
        peak_bytes=peak_bytes,
        step_seconds=step_seconds,
        reserved_bytes=peak_bytes,
        swapped_out_bytes=0,
        exposed_copy_seconds=0.0,
        late_loads=0,
        misses=0,
        moments=moments,
    )


@pytest.mark.parametrize("ratio", [0.7, 1.02, 1.6])
def test_a_measured_plan_is_predicted_as_it_was_measured(ratio: float) -> None:
    planning = Planning(PROFILE)
    least = StepSimulator(PROFILE).simulate(*RECOMPUTES).peak_bytes
    plan = planning.plan(int(1.1 * least), effort=0.1)
    planning.learn(plan, measure(plan.predicted_peak_bytes, ratio * plan.predicted_step_seconds), has_real_time=True)
    solution = solution_of(PROFILE, plan)
    assert solution is not None
    known = planning.solver(int(1.1 * least)).simulate(solution).step
    assert known.step_seconds == pytest.approx(ratio * plan.predicted_step_seconds)
    assert known.peak_bytes == plan.predicted_peak_bytes


def test_a_written_plan_gives_its_choices_back() -> None:
    plan = hp.plan_memory(PROFILE, int(1.1 * StepSimulator(PROFILE).simulate(*RECOMPUTES).peak_bytes), effort=0.1)
    solution = solution_of(PROFILE, plan)
    assert solution is not None
    step = StepSimulator(PROFILE, plan.corrections).simulate(*solution)
    assert step.peak_bytes == plan.predicted_peak_bytes
    assert step.step_seconds == pytest.approx(plan.predicted_step_seconds)


# ---------------------------------------------------------------------- moments


def test_the_moment_of_the_peak_is_corrected_and_the_others_are_not() -> None:
    predicted = MomentBytes(blocks_forward=80, head_and_loss=100, blocks_backward=90)
    learned = Corrections().with_peak(predicted, 107)
    assert learned.moments == MomentBytes(head_and_loss=7)
    measured = MomentBytes(blocks_forward=70, head_and_loss=100, blocks_backward=107)
    learned = Corrections().with_peak(predicted, 107, measured)
    assert learned.moments == MomentBytes(blocks_forward=-10, blocks_backward=17)


def test_no_moment_is_higher_than_the_measured_peak() -> None:
    predicted = MomentBytes(blocks_forward=80, head_and_loss=100, blocks_backward=95)
    assert Corrections().with_peak(predicted, 90).moments == MomentBytes(head_and_loss=-10, blocks_backward=-5)


def test_what_the_loss_needs_is_free_in_backward() -> None:
    """40 bytes more than predicted at the loss: with one number for the whole step, backward would have 40 bytes less too."""
    profile = small_profile(blocks=3, epilogue=Segment(forward_transient_bytes=8))
    alone = StepSimulator(profile)
    choices = tuple(short_choice(0, "s", "ss") for _ in profile.blocks)
    before = alone.explain(choices, profile.engine)
    after = alone.corrected(Corrections(moments=MomentBytes(head_and_loss=40))).explain(choices, profile.engine)
    assert after.moments.head_and_loss == before.moments.head_and_loss + 40
    assert after.moments.blocks_backward == before.moments.blocks_backward
    assert after.peak_where.endswith("of the head and loss")
    assert after.named_parts()["not explained"] == 40
    assert sum(after.peak_parts) == after.peak_bytes == max(after.moments)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(-?[\d.]+) (?:B|KiB|MiB|GiB|TiB)\b", text)]


@pytest.mark.parametrize("more", [0, 3 * 2**30, 12345])
def test_the_parts_of_a_refusal_add_up_to_the_peak_that_it_names(more: int) -> None:
    """3 GiB that nothing explains were missing in the message of before."""
    profile = stack_profile("8k")
    alone = StepSimulator(profile).simulate((short_choice(-1, "", ""),) * len(profile.blocks), profile.engine)
    profile = dataclasses.replace(profile, measured=Measured(step_seconds=0.66, peak_bytes=alone.peak_bytes + more))
    with pytest.raises(BudgetTooSmallError, match=r"smallest peak found is") as caught:
        hp.plan_memory(profile, profile.base.total + 2**20, effort=0.1)
    found = re.search(r"smallest peak found is ([\d.]+ GiB), at the [^(]*\(([^)]*)\)", str(caught.value))
    assert found is not None
    assert sum(numbers(found[2])) == pytest.approx(numbers(found[1])[0], abs=1e-9)
    assert ("not explained" in found[2]) == (more > 2**24)


@pytest.mark.parametrize("whole", [5, 1023, 1024, 1500, 3 * 2**30 + 7, 2**42 + 1])
def test_written_parts_add_up(whole: int) -> None:
    parts = {"weights": whole // 3, "gradients": whole // 3, "activations": whole - 2 * (whole // 3)}
    text, made_of = shown_parts(whole, parts)
    assert sum(numbers(made_of)) == pytest.approx(numbers(text)[0], abs=1e-9)


def test_gradients_of_before_and_of_the_step_are_one_part() -> None:
    parts = parts_with_base(small_profile(), {"base": 100, "gradients": 5, "saved": 7})
    assert parts == {"weights": 60, "gradients": 35, "optimizer": 8, "other": 2, "saved": 7}


def test_a_plan_of_the_first_schema_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    hp.plan_memory(small_profile(), 125, effort=0.1).save(path)
    data = json.loads(path.read_text())
    data["schema"] = "hyper_parallel.plan/1"
    data["corrections"] = {"peak_bytes": 9, "time_scale": 1.5}
    path.write_text(json.dumps(data))
    loaded = Plan.load(path)
    assert loaded.corrections == Corrections.of_work(1.5, moments=MomentBytes.of([9] * 5))
