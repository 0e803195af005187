"""A plan on a model: the fates it names, nothing where it names none, refusals, and the way back."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import CheckpointWrapper, native
from hyper_parallel.backends.torch.planner.blocks import fingerprint_of
from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import BlockPlan, OpDecision, Plan, Recipe, RegionPlan
from hyper_parallel.planner.profile import EngineSettings
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.testing import simulated_accelerator

from .models import BATCH, LENGTH, WIDTH, Transformer, assert_same, gradients, transformer, tree_of

ACTIVATION = BATCH * LENGTH * WIDTH * 4
GUESS = Prediction(
    peak_bytes=1,
    peak_where="",
    peak_parts={},
    step_seconds=1.0,
    compute_seconds=1.0,
    replay_seconds=0.0,
    exposed_seconds=0.0,
)


def decision(name: str, occurrence: int, fate: Fate) -> OpDecision:
    return OpDecision(name=name, overload="default", module="", occurrence=occurrence, fate=fate, reason="")


def plan_for(model: torch.nn.Module) -> Plan:
    """Layer 0 in halves, layer 1 as a whole, the rest left alone."""
    halves = Recipe(
        kind="Layer",
        regions=(
            RegionPlan(module="attn", input_fate=Fate.SWAP, ops=(decision("addmm", 0, Fate.SWAP),)),
            RegionPlan(module="mlp", input_fate=Fate.SAVE, ops=(decision("addmm", 0, Fate.SAVE),)),
        ),
    )
    whole = Recipe(
        kind="Layer",
        regions=(
            RegionPlan(
                module="",
                input_fate=Fate.SWAP,
                ops=(decision("addmm", 2, Fate.SWAP), decision("addmm", 0, Fate.RECOMPUTE)),
            ),
        ),
    )
    return Plan(
        model_fingerprint=fingerprint_of(model),
        budget_bytes=10**6,
        blocks=tuple(BlockPlan(name=f"layers.{number}", recipe=number if number < 2 else None) for number in range(4)),
        recipes=(halves, whole),
        settings=EngineSettings(window_bytes=4096, tail_bytes=0, prefetch_bytes=65536, min_bytes=0),
        predicted=GUESS,
        untouched=GUESS,
    )


def test_exactly_the_named_values_leave() -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    with simulated_accelerator() as sim:
        with hp.apply_plan(model, plan_for(model)) as applied:
            got = gradients(model, step)
            stats, num_regions = applied.stats(), applied.num_regions
        assert_same(got, wanted)
    out = sorted(nbytes for what, nbytes in sim.events if what == "offload")
    # qkv and the input of layer 0's first half; the input of layer 1 and its third matmul, the MLP's first.
    assert out == sorted([ACTIVATION, 3 * ACTIVATION, ACTIVATION, 4 * ACTIVATION])
    assert stats.saved_bytes == 4 * ACTIVATION
    assert num_regions == 3
    recorded = 0 if native.load() is None else 3
    assert stats.regions_from_tape == recorded
    assert sum(stats.regions_from_python.values()) == 3 - recorded


def test_blocks_that_are_left_alone_are_not_touched() -> None:
    model, _ = transformer()
    originals = list(model.layers)
    with hp.apply_plan(model, plan_for(model)):
        assert model.layers[0] is originals[0]
        assert type(model.layers[0].attn) is type(model.layers[0].mlp) is CheckpointWrapper
        assert type(model.layers[1]) is CheckpointWrapper
        assert model.layers[2] is originals[2]
        assert model.layers[3] is originals[3]
        assert type(model.layers[2].attn) is not CheckpointWrapper


def test_nothing_is_left_after_remove() -> None:
    model, step = transformer()
    before, keys = tree_of(model), list(model.state_dict())
    applied = hp.apply_plan(model, plan_for(model))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Transformer().named_parameters()]
    step()
    applied.remove()
    applied.remove()
    assert tree_of(model) == before


def test_a_planned_model_is_copied_pickled_and_loaded_from_a_plain_checkpoint(tmp_path: Path) -> None:
    model, step = transformer()
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    wanted = gradients(model, step)
    with simulated_accelerator(), hp.apply_plan(model, plan_for(model)):
        model.load_state_dict(torch.load(tmp_path / "plain.pt"))
        assert_same(gradients(model, step), wanted)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.ones(2, 5, dtype=torch.long)).sum().backward()
            assert type(twin.layers[1]) is CheckpointWrapper


def test_another_model_is_refused() -> None:
    model, _ = transformer()
    plan = plan_for(model)
    other = Transformer(5)
    before = tree_of(other)
    with pytest.raises(PlanError, match=r"cannot be applied to Transformer, because it was made for another one"):
        hp.apply_plan(other, plan)
    assert tree_of(other) == before


def test_a_second_plan_is_refused_until_the_first_is_removed() -> None:
    model, _ = transformer()
    plan = plan_for(model)
    with hp.apply_plan(model, plan):
        before = tree_of(model)
        with pytest.raises(PlanError, match=r"layers\.0 is wrapped already, or something in it is"):
            hp.apply_plan(model, plan)
        assert tree_of(model) == before
    hp.apply_plan(model, plan).remove()


def test_a_module_that_is_not_there_is_named_and_nothing_is_applied() -> None:
    model, _ = transformer()
    plan = plan_for(model)
    gone = dataclasses.replace(plan.recipes[0].regions[1], module="moe")
    bad = dataclasses.replace(
        plan,
        recipes=(dataclasses.replace(plan.recipes[0], regions=(plan.recipes[0].regions[0], gone)), plan.recipes[1]),
    )
    before = tree_of(model)
    with pytest.raises(PlanError, match=r"names a module 'layers\.0\.moe' that this model does not have"):
        hp.apply_plan(model, bad)
    assert tree_of(model) == before


@pytest.mark.parametrize("wrong", [None, "plan.json", 3])
def test_what_is_no_plan(wrong: object) -> None:
    model, _ = transformer()
    with pytest.raises(TypeError, match=r"expected a Plan, got .*Plan\.load\(path\)"):
        hp.apply_plan(model, wrong)


def test_without_gradients_a_region_is_a_plain_call() -> None:
    model, _ = transformer()
    ids = torch.ones(2, 5, dtype=torch.long)
    wanted = model.eval()(ids).detach()
    with simulated_accelerator() as sim, hp.apply_plan(model, plan_for(model)), torch.no_grad():
        assert torch.equal(model(ids), wanted)
    assert sim.swapped_bytes == 0


def test_the_report_says_what_was_planned_and_counted(tmp_path: Path) -> None:
    model, step = transformer()
    with simulated_accelerator(), hp.apply_plan(model, plan_for(model)) as applied:
        step()
        applied.report(tmp_path / "report.txt")
        applied.report(tmp_path / "report.json")
        with pytest.raises(ValueError, match=r"cannot write report.html: .* hyper-parallel bench MODULE:FACTORY"):
            applied.report(tmp_path / "report.html")
    text = (tmp_path / "report.txt").read_text()
    assert "budget 976.56 KiB" in text
    assert f"swapped_out_bytes: {9 * ACTIVATION}" in text
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["swapped_out_bytes"] == 9 * ACTIVATION
    assert data["predicted_peak_bytes"] == 1


def test_a_saved_plan_does_the_same(tmp_path: Path) -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    plan_for(model).save(tmp_path / "plan.json")
    plan = hp.Plan.load(tmp_path / "plan.json")
    with simulated_accelerator() as sim:
        with hp.apply_plan(model, plan):
            got = gradients(model, step)
        assert_same(got, wanted)
        assert sim.swapped_bytes == 9 * ACTIVATION


def test_room_that_the_budget_leaves_is_used_when_it_is_given() -> None:
    """With room for everything no copy out holds compute up: nothing is let go before backward wants it."""
    model, step = transformer()
    wanted = gradients(model, step)
    peaks, drops = [], []
    for device_bytes in (None, 10**9):
        with (
            simulated_accelerator() as sim,
            hp.apply_plan(model, plan_for(model), device_bytes=device_bytes) as applied,
        ):
            got = gradients(model, step)
            assert applied.device_bytes == device_bytes
            peaks.append(sim.peak_bytes)
            drops.append(sum(what == "drop" for what, _ in sim.events))
        assert_same(got, wanted)
    assert drops[0] > 0
    assert drops[1] == 0
    assert peaks[1] > peaks[0]
