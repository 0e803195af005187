"""Plans that need no search: every block treated alike, as a person does it by hand.

A searched plan rests on a simulation, and a simulation can be wrong: where blocks run kernels that no hook sees, where the
host is the slower one, where the allocator retries. What a person would try first is therefore measured too, and
``fit_memory`` never answers with less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.fates import Fate
from hyper_parallel.planner import by_hand
from hyper_parallel.planner.block_trace import Choice
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.plan import BlockPlan, Plan, Recipe, RegionPlan
from hyper_parallel.planner.planning import prediction_of, untouched_prediction, written_plan
from hyper_parallel.planner.profile import EngineSettings, Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator

__all__ = ["RECOMPUTED", "RECOMPUTED_SWAPPED", "SWAPPED", "SimplePlan", "as_measured", "simple_plan", "simple_plans"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimplePlan:
    """One way to treat every block."""

    name: str
    is_replayed: bool = True


RECOMPUTED: Final = SimplePlan(name=by_hand.RECOMPUTED)
RECOMPUTED_SWAPPED: Final = SimplePlan(name=by_hand.RECOMPUTED_SWAPPED)
SWAPPED: Final = SimplePlan(name="everything that blocks save swapped", is_replayed=False)


def simple_plans(profile: Profile) -> tuple[SimplePlan, ...]:
    """The ways that there are for this model: the two plain ones, the presets, and last the swap of whole blocks."""
    return (*(SimplePlan(name=name) for name in by_hand.choices_by_hand(profile)), SWAPPED)


def simple_plan(profile: Profile, budget: int, way: SimplePlan, solver: Solver | None = None) -> Plan:
    """Every block treated in one way. Of a swap of whole blocks the simulation is near, not the same: see ``swapped_choices``."""
    solver = solver or Solver(StepSimulator(profile))
    if way.is_replayed:
        choices = solver.by_hand[way.name]
        answers = [solver.simulate(Solution(choices, settings)) for settings in _settings(solver, choices)]
        return _named(written_plan(solver, min(answers, key=lambda answer: answer.key(budget)), budget), way.name)
    near = solver.simulate(Solution(by_hand.swapped_choices(profile), profile.engine))
    region = RegionPlan(module="", input_fate=Fate.SWAP, ops=(), is_replayed=False)
    return Plan(
        model_fingerprint=profile.model_fingerprint,
        budget_bytes=budget,
        blocks=tuple(
            BlockPlan(
                name=block.name,
                recipe=block.kind,
                reason=way.name,
                is_compiled=profile.kinds[block.kind].graph is not None,
            )
            for block in profile.blocks
        ),
        recipes=tuple(Recipe(kind=kind.name, regions=(region,)) for kind in profile.kinds),
        settings=profile.engine,
        predicted=prediction_of(solver, near),
        untouched=untouched_prediction(solver),
    )


def _settings(solver: Solver, choices: Sequence[Choice]) -> Iterator[EngineSettings]:
    """The engine's own settings, and those under which swapped values take the least memory."""
    engine = solver.profile.engine
    yield engine
    traces = [solver.simulator.trace(block, choice) for block, choice in enumerate(choices)]
    largest = max((nbytes for trace in traces for nbytes in trace.records), default=0)
    if engine.is_tunable and largest:
        yield dataclasses.replace(engine, window_bytes=largest, tail_bytes=0, prefetch_bytes=2 * largest)


def _named(plan: Plan, reason: str) -> Plan:
    """The plan with one reason for everything; what is recomputed in a region need not be listed."""
    recipes = [
        dataclasses.replace(
            recipe,
            regions=tuple(
                dataclasses.replace(
                    region,
                    ops=tuple(
                        dataclasses.replace(op, reason=reason) for op in region.ops if op.fate is not Fate.RECOMPUTE
                    ),
                )
                for region in recipe.regions
            ),
        )
        for recipe in plan.recipes
    ]
    blocks = [block if block.recipe is None else dataclasses.replace(block, reason=reason) for block in plan.blocks]
    return dataclasses.replace(plan, recipes=tuple(recipes), blocks=tuple(blocks))


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
