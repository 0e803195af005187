"""A plan: for every block and op a fate with its reason, what it should cost, and where the peak should sit.

Identical blocks share a :class:`Recipe`; a block without one is left alone. A plan is a value: it is saved, loaded,
compared and printed, and knows the fingerprint of the model it was made for.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.profile import EngineSettings
from hyper_parallel.planner.step_identity import FittedStep
from hyper_parallel.planner.step_inputs import StepInputs
from hyper_parallel.records.moments import MOMENTS
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.record_files import load_record, require, save_record

__all__ = ["BlockPlan", "Corrections", "OpDecision", "Plan", "Recipe", "RegionPlan", "WhatIf"]

SCHEMA: Final = "hyper_parallel.plan/2"
_UNCORRECTED: Final = Corrections()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpDecision:
    """One op instance of a region."""

    name: str
    overload: str
    module: str
    occurrence: int  # how many of this name and overload came before it *in the region*
    fate: Fate
    reason: str
    is_needed: bool = True  # False: no backward reads it, and no replay makes it again
    price_ms_per_gib: float = 0.0  # of making it again; 0 in plans of versions that did not write it
    nbytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """One region of a block. Where it is replayed, ops that are not listed are recomputed."""

    module: str  # path inside the block; "": the block itself
    input_fate: Fate
    ops: tuple[OpDecision, ...]
    is_replayed: bool = True  # False: nothing is run again, and whatever autograd saves inside is swapped

    def __post_init__(self) -> None:
        require(self.input_fate is not Fate.RECOMPUTE, f"RegionPlan {self.module!r}: an input cannot be recomputed")
        require(
            self.is_replayed or not self.ops,
            f"RegionPlan {self.module!r}: decides about {len(self.ops)} ops, and a region that is not replayed asks about none",
        )

    def fate_of(self, name: str, overload: str, occurrence: int) -> Fate:
        """What becomes of one op instance, counted inside the region."""
        otherwise = Fate.RECOMPUTE if self.is_replayed else Fate.SWAP
        return self._table().get((name, overload, occurrence), otherwise)

    def _table(self) -> dict[tuple[str, str, int], Fate]:
        return {(op.name, op.overload, op.occurrence): op.fate for op in self.ops}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The regions of a block, and what becomes of everything in them."""

    kind: str
    regions: tuple[RegionPlan, ...]

    def __post_init__(self) -> None:
        require(bool(self.regions), "Recipe.regions: is empty; a block that is left alone has no recipe")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """One block."""

    name: str
    recipe: int | None = None  # index into Plan.recipes; None: left alone
    reason: str = ""
    is_compiled: bool = False  # when it was profiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What another budget would give."""

    budget_bytes: int
    peak_bytes: int | None  # None: nothing fits
    step_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do with every activation of a step, and what that should give."""

    model_fingerprint: str
    budget_bytes: int
    blocks: tuple[BlockPlan, ...]
    recipes: tuple[Recipe, ...]
    settings: EngineSettings
    predicted: Prediction
    untouched: Prediction  # the step left alone, as the same simulator sees it
    what_if: tuple[WhatIf, ...] = ()
    corrections: Corrections = _UNCORRECTED
    notes: tuple[str, ...] = ()
    inputs: StepInputs | None = None  # the shapes of the measured step; None: not known
    fitted: FittedStep | None = None  # in a store of plans: what it was fitted to

    def __post_init__(self) -> None:
        for block in self.blocks:
            require(
                block.recipe is None or 0 <= block.recipe < len(self.recipes),
                f"Plan.blocks: {block.name} follows recipe {block.recipe}; there are {len(self.recipes)}",
            )

    @property
    def predicted_peak_bytes(self) -> int:
        """The peak of active device bytes."""
        return self.predicted.peak_bytes

    @property
    def predicted_step_seconds(self) -> float:
        """One step."""
        return self.predicted.step_seconds

    @property
    def does_nothing(self) -> bool:
        """Whether the step fits as it is."""
        return all(block.recipe is None for block in self.blocks)

    def recipe_of(self, block: BlockPlan) -> Recipe | None:
        """What becomes of a block; None: it is left alone."""
        return None if block.recipe is None else self.recipes[block.recipe]

    def check_model(self, fingerprint: str, *, model: str = "this model") -> None:
        """Refuse a model that the plan was not made for."""
        if fingerprint != self.model_fingerprint:
            raise PlanError(
                f"Plan: cannot be applied to {model}, because it was made for another one (fingerprint {self.model_fingerprint}, "
                f"here {fingerprint}; blocks {self.blocks[0].name} .. {self.blocks[-1].name}). Profile this model and plan again."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=SCHEMA, older=_OLDER)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """How ``other`` differs from this plan, one line each; empty when both do the same."""
        if not isinstance(other, Plan):
            raise TypeError(f"Plan.diff: expected a Plan, got {type(other).__name__}; read one with Plan.load(path)")
        return tuple(_differences(self, other))

    def treatments(self) -> tuple[tuple[str, str], ...]:
        """What becomes of which blocks: (names, reason), blocks of one treatment together."""
        groups: dict[int | None, list[BlockPlan]] = {}
        for block in self.blocks:
            groups.setdefault(block.recipe, []).append(block)
        return tuple(
            (
                _shown_names([block.name for block in members]),
                f"left alone; {members[0].reason}" if recipe is None else members[0].reason,
            )
            for recipe, members in groups.items()
        )

    def summary(self) -> str:
        """The plan for a person, a screen of text."""
        return "\n".join(_summary(self))


def _from_first_schema(data: dict[str, Any]) -> dict[str, Any]:
    """A plan of schema 1 had one factor for all work, and one number of bytes for all moments."""
    old = data.get("corrections")
    if isinstance(old, dict):
        peak, scale = old.pop("peak_bytes", 0), old.pop("time_scale", 1.0)
        data["corrections"] = {
            **old,
            "moments": dict.fromkeys(MOMENTS, peak),
            **dict.fromkeys(("work_scale", "issue_scale", "region_scale", "swap_scale"), scale),
        }
    return data


_OLDER: Final = {"hyper_parallel.plan/1": _from_first_schema}
_REPLAYED: Final = "recompute"


def _fates(plan: Plan) -> dict[tuple[str, str], str]:
    """(block, value) to its fate in words. Ops are counted per module, so that plans with other regions can be compared."""
    found: dict[tuple[str, str], str] = {}
    for block in plan.blocks:
        recipe = plan.recipe_of(block)
        if recipe is None:
            found[block.name, "regions"] = "left alone"
            continue
        found[block.name, "regions"] = " + ".join(
            (region.module or "whole") + ("" if region.is_replayed else " (not replayed, all it saves swapped)")
            for region in recipe.regions
        )
        seen: Counter[str] = Counter()
        for region in recipe.regions:
            found[block.name, f"input of {region.module or 'the block'}"] = region.input_fate.value
            for op in region.ops:
                label = f"{op.module}::{op.name}"
                found[block.name, f"{label}#{seen[label]}"] = op.fate.value
                seen[label] += 1
    return found


def _differences(mine: Plan, other: Plan) -> Iterator[str]:
    if mine.model_fingerprint != other.model_fingerprint:
        yield f"model: {mine.model_fingerprint} -> {other.model_fingerprint}"
    if mine.budget_bytes != other.budget_bytes:
        yield f"budget: {show_bytes(mine.budget_bytes)} -> {show_bytes(other.budget_bytes)}"
    for name in ("window_bytes", "tail_bytes", "prefetch_bytes", "min_bytes"):
        before, after = getattr(mine.settings, name), getattr(other.settings, name)
        if before != after:
            yield f"{name}: {show_bytes(before)} -> {show_bytes(after)}"
    before_fates, after_fates = _fates(mine), _fates(other)
    changes: dict[str, list[str]] = {}
    for block, value in [*before_fates, *(key for key in after_fates if key not in before_fates)]:
        before_fate, after_fate = before_fates.get((block, value)), after_fates.get((block, value))
        has_other_regions = before_fates.get((block, "regions")) != after_fates.get((block, "regions"))
        is_said_already = value != "regions" and None in (before_fate, after_fate) and has_other_regions
        if before_fate != after_fate and not is_said_already:
            change = f"{value}: {before_fate or _REPLAYED} -> {after_fate or _REPLAYED}"
            changes.setdefault(change, []).append(block)
    for change, blocks in changes.items():
        yield f"{change} in {_shown_names(blocks)}"
    if mine.predicted != other.predicted:
        yield (
            f"predicted: {show_bytes(mine.predicted_peak_bytes)}, {mine.predicted_step_seconds * 1e3:.1f} ms -> "
            f"{show_bytes(other.predicted_peak_bytes)}, {other.predicted_step_seconds * 1e3:.1f} ms"
        )


def _shown_names(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{len(names)} blocks ({names[0]} .. {names[-1]})"


def _summary(plan: Plan) -> Iterator[str]:
    predicted, untouched = plan.predicted, plan.untouched
    yield (
        f"budget {show_bytes(plan.budget_bytes)}: peak {show_bytes(predicted.peak_bytes)} ({predicted.peak_where}), step "
        f"{predicted.step_seconds * 1e3:.1f} ms; left alone {show_bytes(untouched.peak_bytes)}, "
        f"{untouched.step_seconds * 1e3:.1f} ms"
    )
    if plan.does_nothing:
        yield "the step fits: nothing is done"
    else:
        yield (
            f"compute {predicted.compute_seconds * 1e3:.1f} ms, replayed {predicted.replay_seconds * 1e3:.1f} ms, waiting for "
            f"copies {predicted.exposed_seconds * 1e3:.1f} ms; {show_bytes(predicted.swapped_out_bytes)} out, "
            f"{show_bytes(predicted.swapped_in_bytes)} back"
        )
        yield (
            f"window {show_bytes(plan.settings.window_bytes)}, tail {show_bytes(plan.settings.tail_bytes)}, "
            f"prefetch {show_bytes(plan.settings.prefetch_bytes)}"
        )
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in predicted.peak_parts.items() if size)
    yield f"the peak is made of: {parts}"
    yield from _recipe_lines(plan)
    for other in plan.what_if:
        if other.peak_bytes is None or other.step_seconds is None:
            yield f"with {show_bytes(other.budget_bytes)}: nothing fits"
        else:
            yield (
                f"with {show_bytes(other.budget_bytes)}: peak {show_bytes(other.peak_bytes)}, "
                f"step {other.step_seconds * 1e3:.1f} ms"
            )
    yield from plan.notes


def _recipe_lines(plan: Plan) -> Iterator[str]:
    groups: dict[int | None, list[BlockPlan]] = {}
    for block in plan.blocks:
        groups.setdefault(block.recipe, []).append(block)
    for recipe_index, members in groups.items():
        names = _shown_names([block.name for block in members])
        if recipe_index is None:
            yield f"{names}: left alone; {members[0].reason}"
            continue
        yield f"{names}: {members[0].reason}"
        for region in plan.recipes[recipe_index].regions:
            if not region.is_replayed:
                yield f"  {region.module or 'whole block'}: not replayed; whatever it saves for backward is swapped"
                continue
            kept = [
                f"{op.fate.value} {op.module}::{op.name}#{op.occurrence}"
                for op in region.ops
                if op.fate is not Fate.RECOMPUTE
            ]
            yield f"  {region.module or 'whole block'}: input {region.input_fate.value}; {', '.join(kept) or 'nothing kept'}"
