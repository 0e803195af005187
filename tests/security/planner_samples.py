"""One good profile and one good plan, as small as they can be with every kind of field in them."""

from __future__ import annotations

from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import BlockPlan, OpDecision, Plan, Recipe, RegionPlan, WhatIf
from hyper_parallel.planner.profile import (
    BaseBytes,
    Block,
    BlockKind,
    Cut,
    CutRegion,
    EngineSettings,
    FarCaps,
    Link,
    Measured,
    OpProfile,
    Profile,
    Segment,
)
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.versions import Versions


def small_profile() -> Profile:
    """Two blocks of two ops."""
    matmul = OpProfile(
        name="mm", module="up", seconds=1e-3, output_bytes=4096, kept_bytes=4096, inputs=(-1,), kept_by=(1,)
    )
    gelu = OpProfile(name="gelu", seconds=1e-4, output_bytes=4096, inputs=(0,), backward_bytes=64)
    kind = BlockKind(
        name="Layer",
        ops=(matmul, gelu),
        cuts=(Cut(regions=(CutRegion(module="", first_op=0, stop_op=2),)),),
        backward_seconds=2e-3,
        gradient_bytes=128,
    )
    return Profile(
        versions=Versions(framework="torch", framework_version="2", device="simulated", library_version="0"),
        model_fingerprint="abc",
        base=BaseBytes(weights=100, gradients=100),
        kinds=(kind,),
        blocks=(Block(name="layers.0", kind=0, input_bytes=512), Block(name="layers.1", kind=0, input_bytes=512)),
        prologue=Segment(forward_seconds=1e-3),
        epilogue=Segment(kept_bytes=10),
        measured=Measured(step_seconds=0.01, peak_bytes=20000, peak_where="layers.1"),
        link=Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9),
        far=FarCaps(host_bytes=10**6),
    )


def small_plan() -> Plan:
    """One block with a recipe, one left alone."""
    swapped = OpDecision(name="mm", overload="default", module="up", occurrence=0, fate=Fate.SWAP, reason="large")
    predicted = Prediction(
        peak_bytes=9000,
        peak_where="layers.0",
        peak_parts={"weights": 100, "saved": 8900},
        step_seconds=0.011,
        compute_seconds=0.01,
        replay_seconds=0.001,
        exposed_seconds=0.0,
    )
    return Plan(
        model_fingerprint="abc",
        budget_bytes=10000,
        blocks=(BlockPlan(name="layers.0", recipe=0), BlockPlan(name="layers.1")),
        recipes=(Recipe(kind="Layer", regions=(RegionPlan(module="", input_fate=Fate.SAVE, ops=(swapped,)),)),),
        settings=EngineSettings(),
        predicted=predicted,
        untouched=predicted,
        what_if=(WhatIf(budget_bytes=9000, peak_bytes=None, step_seconds=None),),
        notes=("a note",),
    )
