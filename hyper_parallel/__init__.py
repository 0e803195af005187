"""Save, recompute or swap every activation of a training step, without changing a gradient.

The public names. They are found at first use; importing this package imports no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel._version import __version__

if TYPE_CHECKING:
    from hyper_parallel.config import SwapConfig, configure
    from hyper_parallel.core.activation_checkpoint import (
        CheckpointPolicy,
        SwapManager,
        checkpoint,
        checkpoint_wrapper,
        swap,
        swap_tensor_wrapper,
        swap_wrapper,
    )
    from hyper_parallel.core.activation_checkpoint.statistics import SwapStats
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.planner.fit import apply_plan, fit_memory, profile_memory
    from hyper_parallel.planner.plan import Plan
    from hyper_parallel.planner.planning import plan_memory
    from hyper_parallel.planner.profile import Profile
    from hyper_parallel.planner.rules import apply_rules, list_ops
    from hyper_parallel.platform.platform import get_platform

_HOMES = {
    "CheckpointPolicy": "hyper_parallel.core.activation_checkpoint",
    "HyperParallelError": "hyper_parallel.errors",
    "Plan": "hyper_parallel.planner.plan",
    "Profile": "hyper_parallel.planner.profile",
    "SwapConfig": "hyper_parallel.config",
    "SwapManager": "hyper_parallel.core.activation_checkpoint",
    "SwapStats": "hyper_parallel.core.activation_checkpoint.statistics",
    "apply_plan": "hyper_parallel.planner.fit",
    "apply_rules": "hyper_parallel.planner.rules",
    "checkpoint": "hyper_parallel.core.activation_checkpoint",
    "checkpoint_wrapper": "hyper_parallel.core.activation_checkpoint",
    "configure": "hyper_parallel.config",
    "fit_memory": "hyper_parallel.planner.fit",
    "get_platform": "hyper_parallel.platform.platform",
    "list_ops": "hyper_parallel.planner.rules",
    "plan_memory": "hyper_parallel.planner.planning",
    "profile_memory": "hyper_parallel.planner.fit",
    "swap": "hyper_parallel.core.activation_checkpoint",
    "swap_tensor_wrapper": "hyper_parallel.core.activation_checkpoint",
    "swap_wrapper": "hyper_parallel.core.activation_checkpoint",
}

__all__ = [
    "CheckpointPolicy",
    "HyperParallelError",
    "Plan",
    "Profile",
    "SwapConfig",
    "SwapManager",
    "SwapStats",
    "__version__",
    "apply_plan",
    "apply_rules",
    "checkpoint",
    "checkpoint_wrapper",
    "configure",
    "fit_memory",
    "get_platform",
    "list_ops",
    "plan_memory",
    "profile_memory",
    "stats",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
]


def stats() -> SwapStats:
    """What became of saved values since the last ``SwapManager().reset()``: bytes by fate and reason, copy times, hits."""
    from hyper_parallel.core.activation_checkpoint.swap import SwapManager

    return SwapManager().stats()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hyper_parallel' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
