"""``torch.nn.parallel.DistributedDataParallel``: one line, before or after it is put around the model.

model = DistributedDataParallel(model)
apply(model, "boundary")
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
    """Treat the model inside; options as in ``integrations.treatment``. With a budget, all ranks agree on one plan."""
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)
    parallel = needed("torch.nn.parallel", who="integrations.ddp.apply")
    if isinstance(model, parallel.DataParallel):
        raise TypeError(
            "integrations.ddp.apply: DataParallel copies the model to threads in every step; use DistributedDataParallel"
        )
    inner = model.module if isinstance(model, parallel.DistributedDataParallel) else model
    return Treated(treatment, [inner], step)
