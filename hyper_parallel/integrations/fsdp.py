"""FSDP2 (``torch.distributed.fsdp.fully_shard``): one line, before or after the blocks are sharded.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    apply(model, "boundary")

A region around a sharded block gathers its weights again when it is replayed, as FSDP2 does for its backward anyway.
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
    """Treat a model that is, or will be, sharded; options as in ``integrations.treatment``."""
    treatment = Treatment(what=what, budget=budget, blocks=blocks, store=store)
    old = needed("torch.distributed.fsdp", who="integrations.fsdp.apply").FullyShardedDataParallel
    if any(isinstance(module, old) for module in getattr(model, "modules", tuple)()):
        raise TypeError(
            "integrations.fsdp.apply: FullyShardedDataParallel (FSDP1) flattens the blocks' weights under shells of its own; "
            "shard with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    return Treated(treatment, [model], step)
