"""A plan applied to a MindSpore model; see ``backends/planning/plan_regions.py``."""

from __future__ import annotations

from typing import Any

from hyper_parallel.backends.mindspore.planner.blocks import require_cell
from hyper_parallel.backends.mindspore.planner.framework import MINDSPORE
from hyper_parallel.backends.planning import plan_regions, step_inputs
from hyper_parallel.backends.planning.plan_regions import AppliedPlan, apply_plan_to

__all__ = ["AppliedPlan", "PlannedRegion", "apply_plan"]


class PlannedRegion(plan_regions.PlannedRegion):
    """A region of a MindSpore model."""

    framework = MINDSPORE


class InputWatch(step_inputs.InputWatch):
    """A hook on a cell."""

    framework = MINDSPORE


def apply_plan(model: Any, plan: Any, *, device_bytes: int | None = None) -> AppliedPlan:
    """See ``hyper_parallel.apply_plan``."""
    require_cell(model, "apply_plan")
    return apply_plan_to(model, plan, watch_class=InputWatch, region_class=PlannedRegion, device_bytes=device_bytes)
