"""TRL's trainers: the callback of ``transformers.Trainer``, which they all are.

    SFTTrainer(model, args=SFTConfig(...), train_dataset=..., callbacks=[callback("boundary")])

TRL's configurations switch gradient checkpointing on unless told otherwise; the callback takes its place while training
runs. ``activation_offloading=True`` is refused: it moves the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_parallel.integrations import transformers
from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import What
from hyper_parallel.planner.backend import Step
from hyper_parallel.planner.plan_store import Store

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["callback"]


def callback(
    what: What | None = None,
    *,
    budget: int | str | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
    store: Store = True,
) -> TrainerCallback:
    """See :func:`hyper_parallel.integrations.transformers.callback`."""
    needed("trl", who="integrations.trl.callback")
    return transformers.callback(what, budget=budget, blocks=blocks, step=step, store=store)
