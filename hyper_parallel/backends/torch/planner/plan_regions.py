"""A plan applied to a torch model; see ``backends/planning/plan_regions.py``."""

from __future__ import annotations

from typing import Any

from torch import nn

from hyper_parallel.backends.planning import plan_regions
from hyper_parallel.backends.planning.plan_regions import AppliedPlan, apply_plan_to
from hyper_parallel.backends.torch.graph_regions import GraphRegion, InGraph, graph_region
from hyper_parallel.backends.torch.planner.blocks import require_module
from hyper_parallel.backends.torch.planner.framework import TORCH
from hyper_parallel.backends.torch.planner.step_inputs import InputWatch
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.setting_checks import label_of
from hyper_parallel.fates import Fate
from hyper_parallel.platform.torch import compat

__all__ = ["AppliedPlan", "PlannedRegion", "apply_plan", "plan_region"]


class PlannedRegion(plan_regions.PlannedRegion):
    """A region of a torch model."""

    framework = TORCH

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph. Regions that keep the same ops share it, whichever of them are swapped."""
        return InGraph(
            region=_region(self.policy(swaps=False), label) if self._is_replayed else None,
            bound={},
            swap_config=self._settings,
            swaps_inputs=self._swaps_inputs,
            swapped=frozenset(key for key, fate in self.kept.items() if fate is Fate.SWAP),
            predicted=self._predicted,
        )


def plan_region(policy: Any, module: nn.Module) -> GraphRegion:
    """The region that a plan puts into the graph of a module; None for a policy recomputes everything."""
    return _region(policy, label_of(compat.uncompiled(module), TENSORS))


def _region(policy: Any, label: str) -> GraphRegion:
    return graph_region(policy, f"plan on {label}")


def apply_plan(model: Any, plan: Any, *, device_bytes: int | None = None) -> AppliedPlan:
    """See ``hyper_parallel.apply_plan``."""
    require_module(model, "apply_plan")
    return apply_plan_to(model, plan, watch_class=InputWatch, region_class=PlannedRegion, device_bytes=device_bytes)
