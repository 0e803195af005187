"""``torch.distributed.pipelining``: one line for a schedule, a stage, or several stages.

    schedule = ScheduleInterleaved1F1B(stages, num_microbatches)
    apply(schedule, "boundary")

Every stage holds the activations of several microbatches at once; each of them has a life of its own here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import Treated, Treatment, What

__all__ = ["apply"]


def apply(
    target: Any,  # a schedule or stages of torch.distributed.pipelining
    what: What | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
) -> Treated:
    """Treat this rank's stages; options as in ``integrations.treatment``, but for a budget.

    There is no budget here: ranks agree on one plan, and the stages of a pipeline are different models. Give each stage a
    plan of its own (``hp.profile_memory``, ``hp.plan_memory``, ``hp.apply_plan`` on ``stage.submod``), or a preset.
    """
    treatment = Treatment(what=what, blocks=blocks)
    kind = needed("torch.distributed.pipelining.stage", who="integrations.pipelining.apply")._PipelineStageBase
    stages = _stages_of(target)
    if not stages or not all(isinstance(stage, kind) for stage in stages):
        raise TypeError(
            "integrations.pipelining.apply: expected a schedule, a PipelineStage or a list of them, "
            f"got {type(target).__name__}"
        )
    return Treated(treatment, [stage.submod for stage in stages])


def _stages_of(target: Any) -> list[Any]:
    if isinstance(target, list | tuple):
        return list(target)
    for name in ("_stages", "_stage"):  # a schedule of many stages, of one
        if hasattr(target, name):
            found = getattr(target, name)
            return list(found) if isinstance(found, list | tuple) else [found]
    return [target]
