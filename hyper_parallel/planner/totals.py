"""A plan counted by kind of op: how many bytes of each stay, leave or are made again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Final

from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import BlockPlan, OpDecision, Plan, Recipe
from hyper_parallel.planner.profile import BlockKind, OpProfile, Profile
from hyper_parallel.records.run_record import OpTotal

__all__ = ["op_totals"]

_FIELDS: Final = {Fate.SAVE: "saved_bytes", Fate.SWAP: "swapped_bytes", Fate.RECOMPUTE: "recomputed_bytes"}


@dataclasses.dataclass
class _Sum:
    count: int = 0
    nbytes: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def add(self, field: str, nbytes: int, reason: str) -> None:
        self.count += 1
        self.nbytes[field] += nbytes
        if nbytes > self.reasons.get(field, (-1, ""))[0]:
            self.reasons[field] = nbytes, reason


def op_totals(profile: Profile, plan: Plan) -> tuple[OpTotal, ...]:
    """Every op whose output the plan decides about, the largest first."""
    plan.check_model(profile.model_fingerprint, model="this profile")
    sums: dict[str, _Sum] = {}
    for at, block in enumerate(plan.blocks):
        for op, field, nbytes, reason in _of_block(profile.kind_of(at), plan, block):
            if nbytes:
                sums.setdefault(op.name, _Sum()).add(field, nbytes, reason)
    totals = [
        OpTotal(
            op=name,
            count=found.count,
            reason=found.reasons[found.nbytes.most_common(1)[0][0]][1],
            **found.nbytes,
        )
        for name, found in sums.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.total_bytes, total.op)))


def _of_block(kind: BlockKind, plan: Plan, block: BlockPlan) -> Iterator[tuple[OpProfile, str, int, str]]:
    recipe = plan.recipe_of(block)
    decided = {} if recipe is None else _decisions(kind, recipe)
    for at, op in enumerate(kind.ops):
        decision = decided.get(at)
        if decision is not None:
            yield op, _FIELDS[decision.fate], op.output_bytes, decision.reason
        elif recipe is None:
            yield op, "kept_bytes", op.kept_bytes, block.reason
        elif not any(region.is_replayed for region in recipe.regions):
            yield op, "swapped_bytes", op.kept_bytes, block.reason
        elif op.is_keepable and recipe.regions[0].module == "":
            yield op, "recomputed_bytes", op.output_bytes, block.reason


def _decisions(kind: BlockKind, recipe: Recipe) -> dict[int, OpDecision]:
    """Op index to what was decided; a recipe counts instances from the start of its region."""
    cut_regions = {region.module: region for cut in kind.cuts for region in cut.regions}
    found: dict[int, OpDecision] = {}
    for region in recipe.regions:
        cut_region = cut_regions.get(region.module)
        if cut_region is None:
            continue
        decisions = {(op.name, op.overload, op.occurrence): op for op in region.ops}
        seen: Counter[tuple[str, str]] = Counter()
        for at in range(cut_region.first_op, cut_region.stop_op):
            op = kind.ops[at]
            decision = decisions.get((op.name, op.overload, seen[op.name, op.overload]))
            seen[op.name, op.overload] += 1
            if decision is not None:
                found[at] = decision
    return found
