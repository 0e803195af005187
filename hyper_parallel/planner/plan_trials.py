"""Trials of plans: each is applied, measured on every rank and taken off again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import ActivationError, FarMemoryError
from hyper_parallel.planner.backend import Model, PlannerBackend, Step
from hyper_parallel.planner.budget import DeviceMemory
from hyper_parallel.planner.corrections import FACTORS
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.ranks import World, together
from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["BEYOND", "PlanTrials"]

BEYOND: Final = 1.05  # what a step that ran out of memory counts as, over what it should have taken
_LONG_SECONDS: Final = 0.4  # a step from which on a trial takes fewer steps: noise is a smaller part of them
_FOR_RETRIES: Final = 100  # where the allocator retries, the next plan leaves at least this part of the budget free


class PlanTrials:
    """The plans that one fit measured."""

    def __init__(
        self, backend: PlannerBackend, world: World, model: Model, step: Step, budget: int, steps: int
    ) -> None:
        self._backend = backend
        self._world = world
        self._model = model
        self._step = step
        self._budget = budget
        self._steps = steps
        self.device_memory: DeviceMemory | None = None  # what the device can give; None: not known
        self._warmup = 2
        self.history: list[Mapping[str, Any]] = []

    def set_step(self, seconds: float | None) -> None:
        """How long a step takes; None where time is simulated."""
        if seconds is not None and seconds > _LONG_SECONDS:
            self._warmup = 1
            self._steps = min(self._steps, 2)

    def measure(self, plan: Plan, *, is_simple: bool = False, steps: int | None = None) -> StepMeasure | None:
        """The worst rank's peak and time under a plan; None for a simple plan that cannot run on this model."""

        def apply_and_measure() -> StepMeasure | None:
            try:
                with self._backend.apply_plan(self._model, plan):
                    return self._backend.measure_step(
                        self._model,
                        self._step,
                        steps=steps or self._steps,
                        warmup=self._warmup,
                        is_guarded=True,
                        blocks=[block.name for block in plan.blocks],
                    )
            except (ActivationError, FarMemoryError):
                if not is_simple:
                    raise
                return None

        answers = together(self._world, apply_and_measure)
        rows = [answer for answer in answers if answer is not None]
        if len(rows) < len(answers):
            return None
        slowest = max(rows, key=lambda row: row.step_seconds)
        peak = max(row.peak_bytes for row in rows)
        if not all(row.is_complete for row in rows):
            peak = max(peak, round(BEYOND * max(self._budget, plan.predicted_peak_bytes)))
        return dataclasses.replace(
            slowest,
            peak_bytes=peak,
            reserved_bytes=max(row.reserved_bytes for row in rows),
            retries=max(row.retries for row in rows),
            moments=_highest([row.moments for row in rows]),
        )

    def is_under_budget(self, measured: StepMeasure) -> bool:
        """Whether a measured step keeps the budget: by active bytes, by what the allocator holds, and without a retry.

        A step whose allocator retries in its steady state waits for the device each time, however few bytes are active.
        """
        return self.over_bytes(measured) <= 0

    def over_bytes(self, measured: StepMeasure) -> int:
        """By how many bytes the budget was missed; 0 or less: it was kept."""
        over = measured.peak_bytes - self._budget
        available = None if self.device_memory is None else self.device_memory.available_bytes
        if available is not None:
            over = max(over, measured.reserved_bytes - available)
        if measured.retries:
            over = max(over, self._budget // _FOR_RETRIES)
        return over

    def add_to_history(self, plan: Plan, measured: StepMeasure, *, way: str | None = None) -> None:
        """Write down what a plan came to."""
        self.history.append(
            {
                **({} if way is None else {"way": way}),
                "predicted_peak": show_bytes(plan.predicted_peak_bytes),
                "measured_peak": show_bytes(measured.peak_bytes),
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_peak_bytes": measured.peak_bytes,
                "predicted_step_seconds": plan.predicted_step_seconds,
                "measured_step_seconds": measured.step_seconds,
                "exposed_copy_seconds": measured.exposed_copy_seconds,
                "late_loads": measured.late_loads,
                "misses": measured.misses,
                "reserved_bytes": measured.reserved_bytes,
                "retries": measured.retries,
                "factors": {name: round(getattr(plan.corrections, name), 3) for name in FACTORS},
            }
        )


def _highest(rows: list[MomentBytes | None]) -> MomentBytes | None:
    """Of all ranks; None where one does not know."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return None
    highest = known[0]
    for row in known[1:]:
        highest = highest.joined(row, max)
    return highest
