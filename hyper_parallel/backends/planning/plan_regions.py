"""A plan applied: regions in the place of the modules it names, each op instance with the fate the plan gave it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hyper_parallel.backends.planning.blocks import fingerprint_of, refuse_wrapped
from hyper_parallel.backends.planning.framework import Framework
from hyper_parallel.backends.planning.module_tree import BlockRef, Module
from hyper_parallel.backends.planning.replacements import AppliedBlocks, Replacements
from hyper_parallel.backends.planning.step_inputs import InputWatch
from hyper_parallel.config import SwapConfig, current_config, show_bytes
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import PolicyTable
from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange
from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import BlockPlan, Plan, RegionPlan
from hyper_parallel.planner.profile import EngineSettings
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["AppliedPlan", "PlannedRegion", "apply_plan_to", "predicted_change", "swap_config_of"]

_POLICIES = {
    Fate.SAVE: CheckpointPolicy.MUST_SAVE,
    Fate.SWAP: CheckpointPolicy.MUST_SWAP,
    Fate.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
}
_OpKey = tuple[str, str]  # base name, overload


class PlannedRegion:
    """The checkpoint function of one region: a value, so that the model can be copied and pickled with it."""

    framework: ClassVar[Framework]

    def __init__(self, region: RegionPlan, settings: SwapConfig, *, predicted: MemoryChange | None = None) -> None:
        self._predicted = predicted
        self._swaps_inputs = region.input_fate is Fate.SWAP
        self._is_replayed = region.is_replayed
        self._settings = settings
        self.kept = {
            (op.name, op.overload, op.occurrence): op.fate for op in region.ops if op.fate is not Fate.RECOMPUTE
        }
        self._policy = self.policy(swaps=True)

    def policy(self, *, swaps: bool) -> PolicyTable | None:
        """What becomes of the region's ops; None: all are recomputed. Without ``swaps``, what leaves is kept."""
        fates: dict[_OpKey, dict[int, CheckpointPolicy]] = {}
        for (name, overload, occurrence), fate in self.kept.items():
            fates.setdefault((name, overload), {})[occurrence] = _POLICIES[fate if swaps else Fate.SAVE]
        return _ByOccurrence(self.framework, fates) if fates else None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the region."""
        if not self.framework.is_recording():
            return function(*args, **kwargs)
        self.framework.set_predicted(self._predicted)
        if not self._is_replayed:
            return self.framework.swap(function, *args, swap_config=self._settings, **kwargs)
        return self.framework.checkpoint(
            function,
            *args,
            policy_fn=self._policy,
            swap_inputs=self._swaps_inputs,
            swap_config=self._settings,
            **kwargs,
        )


class _ByOccurrence(PolicyTable):
    """The policy of a region: the n-th instance of an op has the n-th fate, the rest is recomputed."""

    def __init__(self, framework: Framework, fates: Mapping[_OpKey, Mapping[int, CheckpointPolicy]]) -> None:
        self._framework = framework
        self._fates = fates

    def answers_for(self, op: Any) -> CheckpointPolicy | Mapping[int, CheckpointPolicy]:
        """See the base class."""
        key = self._framework.op_name(op), self._framework.op_overload(op)
        return self._fates.get(key, CheckpointPolicy.PREFER_RECOMPUTE)

    def missing_in(self, asked: Mapping[_OpKey, int]) -> list[str]:
        """The op instances that have a fate here and were not asked: ``asked`` counts those that were, by op."""
        return [
            f"{name}#{occurrence}"
            for (name, overload), fates in self._fates.items()
            for occurrence in fates
            if occurrence >= asked.get((name, overload), 0)
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByOccurrence) and self._fates == other._fates

    def __hash__(self) -> int:
        return hash(frozenset((op, frozenset(fates.items())) for op, fates in self._fates.items()))


class AppliedPlan(AppliedBlocks):
    """A plan on a model: ``stats()``, ``report(path)``, ``remove()``, or a ``with`` block."""

    def __init__(
        self, replacements: Replacements, plan: Plan, device_bytes: int | None, watch: InputWatch | None = None
    ) -> None:
        super().__init__(replacements)
        self._watch = watch
        self.plan = plan
        self.device_bytes = device_bytes
        self.measured: StepMeasure | None = None  # filled by fit_memory
        self.history: tuple[Mapping[str, Any], ...] = ()
        self.stored_at: str | None = None  # the file of a store of plans that it came from, where nothing was planned

    def remove(self) -> None:
        """Put the model back as it was; nothing happens the second time."""
        if self._watch is not None:
            self._watch.remove()
        super().remove()

    @property
    def num_regions(self) -> int:
        """How many modules of the model are regions now."""
        return len(self._replacements)

    def _facts(self) -> Mapping[str, Any]:
        """What was planned, what was measured of it, and what the engine counted since it was applied."""
        return {
            "budget_bytes": self.plan.budget_bytes,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "predicted_step_seconds": self.plan.predicted_step_seconds,
            "measured_peak_bytes": None if self.measured is None else self.measured.peak_bytes,
            "measured_step_seconds": None if self.measured is None else self.measured.step_seconds,
            "reserved_bytes": None if self.measured is None else self.measured.reserved_bytes,
            "device_bytes": self.device_bytes,
            "regions": self.num_regions,
            "stored_at": self.stored_at,
            "history": list(self.history),
            **self.stats().as_dict(),
        }

    def summary(self) -> str:
        """One line: by how much memory falls, and what that costs."""
        change = predicted_change(self.plan)
        budget = show_bytes(self.plan.budget_bytes)
        if self.measured is None:
            return f"budget {budget}: {change.sentence()}"
        return f"budget {budget}: {change.measured(self.measured.peak_bytes).sentence()}"

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the plan and what became of it: JSON for a name that ends in .json, text otherwise."""
        target = Path(path)
        if target.suffix in (".html", ".htm"):
            raise ValueError(
                f"report: cannot write {target.name}: a plan's report is text or .json, and a page draws a step as it ran; "
                "record one with: hyper-parallel bench MODULE:FACTORY --budget BYTES --html FILE"
            )
        if target.suffix == ".json":
            text = json.dumps({"plan": self.plan.summary().splitlines(), **self._facts()}, indent=2, default=str) + "\n"
        else:
            text = "\n".join([self.plan.summary(), "", *_lines(self._facts())]) + "\n"
        target.write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        return f"<plan on {len(self._replacements)} regions, {self.plan.predicted_peak_bytes} bytes predicted>"


def predicted_change(plan: Plan) -> MemoryChange:
    """Peak and time with and without the plan, as it predicts them. A simulated device has no time of its own."""
    predicted, untouched = plan.predicted, plan.untouched
    return MemoryChange(
        without_bytes=untouched.peak_bytes,
        with_bytes=predicted.peak_bytes,
        is_predicted=True,
        without_seconds=untouched.step_seconds or None,
        with_seconds=predicted.step_seconds or None,
    )


def _lines(facts: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {value}" for name, value in facts.items() if name != "history"] + [
        f"attempt {number}: {attempt}" for number, attempt in enumerate(facts["history"], start=1)
    ]


def apply_plan_to(
    model: Module,
    plan: Any,
    *,
    watch_class: type[InputWatch],
    region_class: type[PlannedRegion],
    device_bytes: int | None,
) -> AppliedPlan:
    """Put the plan's regions in the place of the model's blocks."""
    who = "apply_plan"
    framework = region_class.framework
    if not isinstance(plan, Plan):
        raise TypeError(
            f"{who}: expected a Plan, got {type(plan).__name__}; make one with plan_memory, or Plan.load(path)"
        )
    plan.check_model(fingerprint_of(framework.tree, model), model=type(model).__name__)
    modules = _modules_of(framework, model, plan, who)
    settings = swap_config_of(plan.settings, device_bytes)
    replacements = Replacements(framework, model)
    predicted = predicted_change(plan)
    try:
        for path, module, region in modules:
            replacements.wrap(path, module, region_class(region, settings, predicted=predicted), may_be_in_graph=True)
    except BaseException:
        replacements.restore()
        raise
    watch = None
    if plan.inputs is not None:
        watch = watch_class(plan.inputs, plan.budget_bytes)
        watch.put_on(model)
    return AppliedPlan(replacements, plan, device_bytes, watch)


def _modules_of(framework: Framework, model: Module, plan: Plan, who: str) -> list[tuple[str, Module, RegionPlan]]:
    """Every module that becomes a region; nothing is changed yet."""
    named = dict(framework.tree.named(model))
    found: dict[str, tuple[str, Module, RegionPlan]] = {}
    for block in plan.blocks:
        recipe = plan.recipe_of(block)
        if recipe is None:
            continue
        whole = _module(named, block, "", who)
        refuse_wrapped(framework.tree, model, [BlockRef(block.name, whole)], who)
        framework.refuse_compiled(block.name, whole, may_be_whole=block.is_compiled)  # also where parts become regions
        if block.is_compiled and not framework.is_compiled_whole(whole):
            raise PlanError(
                f"{who}: cannot apply the plan to {block.name}, because it was made for a compiled block, and this one is not "
                "compiled. Compile the blocks as they were when the step was profiled, or profile this model and plan again."
            )
        for region in recipe.regions:
            path = f"{block.name}.{region.module}" if region.module else block.name
            # A module that a step calls twice follows the plan of its first call.
            found.setdefault(path, (path, _module(named, block, region.module, who), region))
    return list(found.values())


def _module(named: Mapping[str, Module], block: BlockPlan, inner: str, who: str) -> Module:
    path = f"{block.name}.{inner}" if inner else block.name
    module = named.get(path)
    if module is None:
        raise PlanError(
            f"{who}: the plan names a module {path!r} that this model does not have; profile it and plan again"
        )
    return module


def swap_config_of(settings: EngineSettings, device_bytes: int | None) -> SwapConfig:
    """The settings of now, with the plan's window, tail and prefetch."""
    now = current_config()
    return dataclasses.replace(
        now,
        min_bytes=settings.min_bytes,
        tail_bytes=settings.tail_bytes,
        window_bytes=settings.window_bytes,
        prefetch_bytes=settings.prefetch_bytes,
        device_bytes=now.device_bytes if device_bytes is None else device_bytes,
    )
