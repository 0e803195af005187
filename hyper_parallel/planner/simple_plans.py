"""Plans that need no search: every block treated alike, as a person does it by hand.

A searched plan rests on a simulation, and a simulation can be wrong: where blocks run kernels that no hook sees, where the
host is the slower one, where the allocator retries. What a person would try first is therefore measured too, and
``fit_memory`` never answers with less.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import Choice
from hyper_parallel.planner.plan import BlockPlan, Corrections, Plan, Recipe, RegionPlan
from hyper_parallel.planner.planning import predict, untouched_prediction
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.prediction import Prediction

__all__ = ["RECOMPUTED", "RECOMPUTED_SWAPPED", "SWAPPED", "SimplePlan", "as_measured", "simple_plan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimplePlan:
    """One way to treat every block."""

    name: str
    input_fate: Fate
    is_replayed: bool


RECOMPUTED: Final = SimplePlan(name="every block recomputed", input_fate=Fate.SAVE, is_replayed=True)
RECOMPUTED_SWAPPED: Final = SimplePlan(
    name="every block recomputed, its inputs swapped", input_fate=Fate.SWAP, is_replayed=True
)
SWAPPED: Final = SimplePlan(name="everything that blocks save swapped", input_fate=Fate.SWAP, is_replayed=False)


def simple_plan(profile: Profile, budget: int, way: SimplePlan) -> Plan:
    """Every block treated in one way. What a swap of whole blocks comes to is not simulated: measuring says it."""
    solver = Solver(StepSimulator(profile, Corrections()))
    untouched = untouched_prediction(solver)
    recipes = tuple(
        Recipe(
            kind=kind.name,
            regions=(RegionPlan(module="", input_fate=way.input_fate, ops=(), is_replayed=way.is_replayed),),
        )
        for kind in profile.kinds
    )
    return Plan(
        model_fingerprint=profile.model_fingerprint,
        budget_bytes=budget,
        blocks=tuple(BlockPlan(name=block.name, recipe=block.kind, reason=way.name) for block in profile.blocks),
        recipes=recipes,
        settings=profile.engine,
        predicted=_replayed(solver, profile, way) if way.is_replayed else untouched,
        untouched=untouched,
    )


def _replayed(solver: Solver, profile: Profile, way: SimplePlan) -> Prediction:
    choices: list[Choice] = []
    for block in profile.blocks:
        cuts = profile.kinds[block.kind].cuts
        whole = next((at for at, cut in enumerate(cuts) if cut.regions[0].module == ""), 0)
        choices.append(solver.space.plain(block.kind, whole, inputs=way.input_fate))
    return predict(solver, tuple(choices), profile.engine)


def as_measured(plan: Plan, profile: Profile, *, peak_bytes: int, step_seconds: float) -> Plan:
    """The plan, which now predicts what was measured of it, with parts that add up to the whole."""
    base = profile.base.total
    predicted = dataclasses.replace(
        plan.predicted,
        peak_bytes=peak_bytes,
        peak_where="measured step",
        peak_parts={"base": min(base, peak_bytes), "activations": max(0, peak_bytes - base)},
        step_seconds=step_seconds,
    )
    note = f"chosen because it was measured: {show_bytes(peak_bytes)}, {step_seconds * 1e3:.1f} ms"
    return dataclasses.replace(plan, predicted=predicted, notes=(*plan.notes, note))
