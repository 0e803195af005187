"""A treatment on this rank's stages of a pipeline: with a budget, plans that are made before the second step."""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.pipeline_budget import FittedRank, PipelineFit
from hyper_parallel.integrations.pipeline_schedules import order_of
from hyper_parallel.integrations.pipeline_watch import ScheduleWatch
from hyper_parallel.integrations.treatment import Treated, Treatment
from hyper_parallel.planner.backend import Step

__all__ = ["PipelineWithBudget", "TreatedPipeline"]


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

    def begin_watch(self, watch: ScheduleWatch) -> None:
        """Let the engine know the schedule's order."""
        self._watch = watch
        watch.put_on()


class PipelineWithBudget(TreatedPipeline):
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
            self.begin_watch(ScheduleWatch(schedule, stages, order, self._before_step))
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
