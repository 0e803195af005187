"""Plans for ranks of a pipeline, and predictions for meshes, from a profile that was measured on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.planner import pipeline_plan
from hyper_parallel.planner.block_trace import LEFT_ALONE
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.mesh_prediction import Mesh, Network, predict_mesh
from hyper_parallel.planner.pipeline_order import gpipe_order, one_f_one_b_order
from hyper_parallel.planner.pipeline_plan import RankPlanning
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.step_simulator import StepSimulator

GIB = 2**30


@pytest.fixture(scope="module")
def profile() -> Profile:
    whole = Profile.load(Path(__file__).parent / "data" / "stack_8k_h200.json")
    measured = dataclasses.replace(whole.measured, under="another number of blocks")  # its peak is of all sixteen
    return dataclasses.replace(whole, blocks=whole.blocks[:3], measured=measured)


def test_one_micro_batch_is_the_plain_step(profile: Profile) -> None:
    alone = StepSimulator(profile).simulate((LEFT_ALONE,) * 3, profile.engine)
    planning = RankPlanning({0: profile}, gpipe_order(0, 1), corrections=Corrections())
    step = planning.untouched().step
    assert step.peak_bytes == alone.peak_bytes
    assert step.step_seconds == pytest.approx(alone.step_seconds)


def test_every_micro_batch_in_flight_takes_its_bytes(profile: Profile) -> None:
    def peak(count: int) -> int:
        return RankPlanning({0: profile}, gpipe_order(0, count), corrections=Corrections()).untouched().step.peak_bytes

    one, two, three = peak(1), peak(2), peak(3)
    assert two - one == three - two > GIB
    of_1f1b = RankPlanning({0: profile}, one_f_one_b_order(0, 2, 6), corrections=Corrections()).untouched()
    assert of_1f1b.step.peak_bytes == two
    assert len(of_1f1b.action_seconds) == 12


@pytest.mark.slow
def test_a_budget_is_kept_and_swapping_helps(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_plan, "_EFFORT", 0.1)
    order = one_f_one_b_order(0, 2, 4)
    planning = RankPlanning({0: profile}, order)
    peak = planning.untouched().step.peak_bytes
    base = planning.profile.base.total
    budget = base + (peak - base) // 2
    found = planning.plan(budget)
    assert found.plan.predicted_peak_bytes <= budget
    assert found.most_in_flight == {0: 2}
    assert found.fitting >= 2
    alone = RankPlanning({0: profile}, order, is_swap_allowed=False).plan(budget)
    assert alone.plan.predicted.swapped_out_bytes == 0
    assert found.busy_seconds < alone.busy_seconds
    assert [block.name for block in found.of_stages[0].blocks] == [block.name for block in profile.blocks]
    assert found.of_stages[0].model_fingerprint == profile.model_fingerprint


def test_a_refusal_names_the_stages(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_plan, "_EFFORT", 0.02)
    with pytest.raises(
        BudgetTooSmallError, match=r"^stages 1, 3: plan_memory: 1.00 GiB cannot hold this step"
    ) as caught:
        RankPlanning({1: profile, 3: profile}, gpipe_order(1, 1) + gpipe_order(3, 1)).plan(GIB)
    assert caught.value.smallest_peak_bytes is not None


def test_a_mesh_divides_what_it_says(profile: Profile) -> None:
    one = predict_mesh(profile, Mesh(), 4)
    piped = predict_mesh(profile, Mesh(pp=3), 4)
    assert [row.in_flight for row in piped.ranks] == [3, 2, 1]
    assert sum(row.blocks for row in piped.ranks) == 3
    assert one.step_seconds / 3 < piped.step_seconds < one.step_seconds
    sharded = predict_mesh(profile, Mesh(fsdp=4), 4)
    assert sharded.ranks[0].base_bytes < one.ranks[0].base_bytes
    split = predict_mesh(profile, Mesh(tp=4), 4, network=Network(tp_bytes_per_second=1e15, hop_seconds=0.0))
    assert split.step_seconds == pytest.approx(one.step_seconds / 4, rel=0.01)
    slow = predict_mesh(profile, Mesh(tp=4), 4, network=Network(tp_bytes_per_second=1e9))
    assert slow.step_seconds > split.step_seconds
    assert any("tp divides" in line for line in split.assumptions)
    deep = predict_mesh(profile, Mesh(pp=2, stages_per_rank=2), 4, schedule="interleaved", layers=8)
    assert [row.stages for row in deep.ranks] == [(0, 2), (1, 3)]


def test_a_mesh_that_cannot_be_is_refused(profile: Profile) -> None:
    with pytest.raises(PlanError, match="8 stages need as many blocks, and the model has 3"):
        predict_mesh(profile, Mesh(pp=8), 4)
    with pytest.raises(PlanError, match="unknown schedule 'zb'; known are gpipe, 1f1b, interleaved"):
        predict_mesh(profile, Mesh(pp=2), 4, schedule="zb")
    with pytest.raises(ValueError, match="cannot read 'dp=3'"):
        Mesh.read("pp=2,dp=3")
    assert Mesh.read("pp=8,fsdp=16,tp=8").devices == 1024
