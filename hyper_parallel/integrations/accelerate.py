"""Accelerate: one line after ``prepare``.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
apply(accelerator, model, "boundary")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import Treated, Treatment, What
from hyper_parallel.planner.backend import Model, Step
from hyper_parallel.planner.plan_store import Store

__all__ = ["apply"]


def apply(
    accelerator: Any,  # accelerate.Accelerator
    model: Model,
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
    store: Store = None,
) -> Treated:
    """Treat a prepared model, under whatever Accelerate put around it; options as in ``integrations.treatment``."""
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)
    kind = needed("accelerate", who="integrations.accelerate.apply").Accelerator
    if not isinstance(accelerator, kind):
        raise TypeError(
            f"integrations.accelerate.apply: expected (accelerator, model, ...), got {type(accelerator).__name__} first"
        )
    if not hasattr(model, "named_modules"):
        raise TypeError(
            f"integrations.accelerate.apply: expected (accelerator, model, ...), got {type(model).__name__} in the model's place"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError(
            "integrations.accelerate.apply: the FSDP plugin's activation_checkpointing=True wraps the same blocks; leave it out"
        )
    # Its inner wrapper keeps the mixed precision that prepare() put on forward: only the shells outside go.
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    return Treated(treatment, [inner], step)
