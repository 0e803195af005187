"""A plan applied to a torch model; see ``backends/planning/plan_regions.py``."""

from __future__ import annotations

from typing import Any

from hyper_parallel.backends.planning import plan_regions
from hyper_parallel.backends.planning.plan_regions import AppliedPlan, apply_plan_to
from hyper_parallel.backends.torch.graph_regions import InGraph, graph_region
from hyper_parallel.backends.torch.planner.blocks import require_module
from hyper_parallel.backends.torch.planner.framework import TORCH
from hyper_parallel.backends.torch.planner.step_inputs import InputWatch

__all__ = ["AppliedPlan", "PlannedRegion", "apply_plan"]


class PlannedRegion(plan_regions.PlannedRegion):
    """A region of a torch model."""

    framework = TORCH

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph."""
        region = graph_region(self._policy, f"plan on {label}", swaps_inputs=self._swaps_inputs)
        return InGraph(region=region if self._is_replayed else None, bound={}, swap_config=self._settings)


def apply_plan(model: Any, plan: Any, *, device_bytes: int | None = None) -> AppliedPlan:
    """See ``hyper_parallel.apply_plan``."""
    require_module(model, "apply_plan")
    return apply_plan_to(model, plan, watch_class=InputWatch, region_class=PlannedRegion, device_bytes=device_bytes)
