"""``torch.distributed.pipelining``: one line for a schedule, a stage, or several stages.

    schedule = ScheduleInterleaved1F1B(stages, num_microbatches)
    apply(schedule, "boundary")
    apply(schedule, budget="60GiB")  # instead: a plan for each stage

Every stage holds the activations of several micro-batches at once; each of them has a life of its own here. A schedule also
says in which order their backwards will come, and swapped bytes come back in that order, before they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.budgets import require_device
from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.pipeline_budget import Budgets, check_budgets
from hyper_parallel.integrations.pipeline_schedules import is_schedule, order_of, stages_of
from hyper_parallel.integrations.pipeline_watch import ScheduleWatch
from hyper_parallel.integrations.treated_pipeline import PipelineWithBudget, TreatedPipeline
from hyper_parallel.integrations.treatment import Treatment, What
from hyper_parallel.planner.backend import Step

__all__ = ["TreatedPipeline", "apply"]


def apply(
    target: Any,  # a schedule or stages of torch.distributed.pipelining
    what: What | None = None,
    *,
    budget: Budgets | None = None,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
) -> TreatedPipeline:
    """Treat this rank's stages; every rank calls it.

    Args:
        target: a schedule, or stages. A budget needs the schedule.
        what: a treatment, as in ``integrations.treatment``.
        budget: instead of ``what``: the memory of this rank's device that a step may use, such as ``"60GiB"`` or ``"90%"``, or
            a mapping from each stage of the pipeline to its own. Stages on one rank share one budget. Each stage gets a plan
            of its own; the number of micro-batches that it holds at once is read from the schedule.
        blocks: patterns of the modules to treat as blocks; None: the repeated ones of each stage are found.
        step: with a budget, a callable that runs ``schedule.step(...)`` once: the plan is made now. None: the first training
            step runs under ``boundary``, and the plan is made before the second one, on its batch.

    Raises:
        ValueError, TypeError: options that cannot be read.
        PlanError: a budget for a schedule whose order is not known, for stages without a schedule, or without a device.
        BudgetTooSmallError: no plan keeps the budget of some stage; on all ranks, and no stage is changed. Without ``step``,
            from the second ``schedule.step(...)``.
    """
    kind = needed("torch.distributed.pipelining.stage", who="integrations.pipelining.apply")._PipelineStageBase
    stages = stages_of(target)
    if not stages or not all(isinstance(stage, kind) for stage in stages):
        raise TypeError(
            "integrations.pipelining.apply: expected a schedule, a PipelineStage or a list of them, "
            f"got {type(target).__name__}"
        )
    if budget is None:
        return _treated(target, stages, Treatment(what=what, blocks=blocks))
    if what is not None:
        raise ValueError(f"integrations.pipelining.apply: {what!r} and budget={budget!r} both say what to do; give one")
    own = check_budgets(budget, [stage.stage_index for stage in stages])
    if not is_schedule(target):
        raise PlanError(
            "integrations.pipelining.apply: a budget needs to know how many micro-batches a stage holds at once. Give the "
            "schedule, not its stages."
        )
    require_device(f"budget={budget!r}")
    return PipelineWithBudget(target, stages, own, blocks, step)


def _treated(target: Any, stages: list[Any], treatment: Treatment) -> TreatedPipeline:
    treated = TreatedPipeline(treatment, [stage.submod for stage in stages])
    if is_schedule(target):
        try:
            order = order_of(target)
        except PlanError:
            return treated  # swapped bytes come back as in any other step
        treated.begin_watch(ScheduleWatch(target, stages, order, lambda args, kwargs: None))
    return treated
