"""PEFT: adapters such as LoRA on a frozen model.

    model = get_peft_model(base, LoraConfig(...))
    apply(model, "boundary")

The blocks are those of the base model. The inputs of the first one need no gradient, which the framework's older kind of
checkpointing does not support (``enable_input_require_grads``); here nothing has to be done about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import Treated, Treatment, What
from hyper_parallel.planner.backend import Model, Step
from hyper_parallel.planner.plan_store import Store

__all__ = ["apply"]


def apply(
    model: Model,
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
    store: Store = None,
) -> Treated:
    """Treat a model that has adapters; options as in ``integrations.treatment``."""
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)
    kind = needed("peft", who="integrations.peft.apply").PeftModel
    if not isinstance(model, kind):
        raise TypeError(
            f"integrations.peft.apply: expected a PeftModel, got {type(model).__name__}; adapters that are added later replace "
            "modules inside the blocks, so call get_peft_model(model, ...) first"
        )
    return Treated(treatment, [model], step)
