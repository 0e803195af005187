"""From a written plan back to the choices that the search and the simulator know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.plan import Plan, Recipe
from hyper_parallel.planner.profile import BlockKind, CutRegion, Profile

__all__ = ["decisions_of", "solution_of"]


def solution_of(profile: Profile, plan: Plan) -> Solution | None:
    """The choices of a plan; None where regions of it cannot be simulated: not replayed, or not of this profile."""
    if len(plan.blocks) != len(profile.blocks):
        return None
    known: dict[tuple[int, int], Choice | None] = {}
    choices = []
    for at, block in enumerate(plan.blocks):
        if block.recipe is None:
            choices.append(LEFT_ALONE)
            continue
        key = profile.blocks[at].kind, block.recipe
        if key not in known:
            known[key] = _choice(profile.kind_of(at), plan.recipes[block.recipe])
        choice = known[key]
        if choice is None:
            return None
        choices.append(choice)
    return Solution(tuple(choices), plan.settings)


def _choice(kind: BlockKind, recipe: Recipe) -> Choice | None:
    modules = [region.module for region in recipe.regions]
    if not all(region.is_replayed for region in recipe.regions):
        return None
    for number, cut in enumerate(kind.cuts):
        if [region.module for region in cut.regions] == modules:
            fates = [Fate.RECOMPUTE] * len(kind.ops)
            for region, planned in zip(cut.regions, recipe.regions):
                table = {(op.name, op.overload, op.occurrence): op.fate for op in planned.ops}
                _add_fates(kind, region, table, fates)
            return Choice(number, tuple(region.input_fate for region in recipe.regions), tuple(fates))
    return None


def _add_fates(kind: BlockKind, region: CutRegion, table: dict[tuple[str, str, int], Fate], fates: list[Fate]) -> None:
    """Of the ops of one region; a recipe counts instances from the start of its region."""
    before = Counter((op.name, op.overload) for op in kind.ops[: region.first_op])
    for at in range(region.first_op, region.stop_op):
        op = kind.ops[at]
        occurrence = op.occurrence - before[op.name, op.overload]
        fates[at] = table.get((op.name, op.overload, occurrence), Fate.RECOMPUTE)


def decisions_of(plan: Plan) -> Hashable:
    """The decisions of a plan, without its reasons and predictions. What is not named is recomputed."""
    recipes = [
        tuple(
            (
                region.module,
                region.input_fate,
                region.is_replayed,
                tuple(
                    (op.name, op.overload, op.occurrence, op.fate) for op in region.ops if op.fate is not Fate.RECOMPUTE
                ),
            )
            for region in recipe.regions
        )
        for recipe in plan.recipes
    ]
    blocks = tuple((block.name, None if block.recipe is None else recipes[block.recipe]) for block in plan.blocks)
    return blocks, plan.settings
