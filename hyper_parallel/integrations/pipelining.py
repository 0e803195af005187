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
from hyper_parallel.integrations.pipeline_budget import Budgets, FittedRank, PipelineFit, check_budgets
from hyper_parallel.integrations.pipeline_schedules import is_schedule, order_of, stages_of
from hyper_parallel.integrations.pipeline_watch import ScheduleWatch
from hyper_parallel.integrations.treatment import Treated, Treatment, What
from hyper_parallel.planner.backend import Step

__all__ = ["TreatedPipeline", "apply"]


class TreatedPipeline(Treated):
    """A treatment on this rank's stages; a context manager whose end, or ``remove()``, takes it off again."""

    fitted: FittedRank | None = None  # the plan of this rank; None: no budget, or no step has run yet
    _watch: ScheduleWatch | None = None

    def summary(self) -> str:
        """What becomes of each stage; with a budget also how many micro-batches fit."""
        return super().summary() if self.fitted is None else self.fitted.plan.summary()

    def remove(self) -> None:
        """Put the stages and the schedule back as they were; nothing happens the second time."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove()
        super().remove()

    def _begin_watch(self, watch: ScheduleWatch) -> None:
        self._watch = watch
        watch.put_on()


class _WithBudget(TreatedPipeline):
    """Stages under ``boundary`` for one step, and from then on under plans that keep the budget."""

    def __init__(self, schedule: Any, stages: list[Any], budget: int | str, blocks: Any, step: Step | None) -> None:
        order = order_of(schedule)
        super().__init__(Treatment(blocks=blocks), [stage.submod for stage in stages])
        self._schedule = schedule
        self._stages = stages
        self._order = order
        self._budget = budget
        self._blocks = blocks
        self._has_run = False
        try:
            self._begin_watch(ScheduleWatch(schedule, stages, order, self._before_step))
            if step is not None:
                self._has_run = True
                step()
                if self.fitted is None:
                    raise PlanError(
                        "integrations.pipelining.apply: step=... did not run the schedule. Give a callable that calls "
                        "schedule.step(...) once, as the training does."
                    )
        except BaseException:
            self.remove()
            raise

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first step makes what every later one finds: buffers, and states of the optimizer. Then a plan can be made."""
        if self.fitted is not None:
            return
        if not self._has_run:
            self._has_run = True
            return
        watch = self._watch
        assert watch is not None, "its step runs"
        try:
            self._remove_handles()
            self.fitted = PipelineFit(
                self._schedule,
                self._stages,
                self._order,
                self._budget,
                blocks=self._blocks,
                run_step=lambda: watch.run(*args, **_without_losses(kwargs)),
            ).run()
        except BaseException:
            self.remove()
            raise
        self._handles.extend(self.fitted.applied)


def _without_losses(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A trial step leaves the caller's list of losses alone."""
    return {**kwargs, "losses": []} if kwargs.get("losses") is not None else kwargs


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
    return _WithBudget(target, stages, own, blocks, step)


def _treated(target: Any, stages: list[Any], treatment: Treatment) -> TreatedPipeline:
    treated = TreatedPipeline(treatment, [stage.submod for stage in stages])
    if is_schedule(target):
        try:
            order = order_of(target)
        except PlanError:
            return treated  # swapped bytes come back as in any other step
        treated._begin_watch(ScheduleWatch(target, stages, order, lambda args, kwargs: None))
    return treated
