"""A budget for this rank's stages of a pipeline: profile one micro-batch of each, plan, run the schedule, correct.

All ranks do this in the same step of the schedule. Ranks that hold the same stages (data parallel replicas) get one plan, for
the one that needs most; all others have plans of their own. Where one rank's budget is too small all ranks raise that error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from hyper_parallel.backends.planning.measure import measure
from hyper_parallel.config import show_bytes
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.integrations.packages import needed
from hyper_parallel.integrations.treatment import Treated, Treatment
from hyper_parallel.planner.backend import AppliedPlan, planner_backend
from hyper_parallel.planner.budget import check_budget, parse_budget
from hyper_parallel.planner.pipeline_order import Order
from hyper_parallel.planner.pipeline_plan import RankPlan, RankPlanning
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.ranks import OneProcess, World, together, worst_of
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["Budgets", "FittedRank", "PipelineFit", "check_budgets"]

Budgets: TypeAlias = int | str | Mapping[int, int | str]
_WHO: Final = "integrations.pipelining.apply"
_ATTEMPTS: Final = 4
_TOLERANCE: Final = 0.03  # how far measured and predicted peak may lie apart before a plan is made again


def check_budgets(budget: Budgets, stages: Sequence[int]) -> int | str:
    """The budget of the rank that holds these stages.

    Raises:
        ValueError: no budget, or none for one of the stages, or two different ones for stages that share a device.
    """
    if not isinstance(budget, Mapping):
        check_budget(budget)
        return budget
    for value in budget.values():
        check_budget(value)
    missing = [stage for stage in stages if stage not in budget]
    if missing:
        raise ValueError(
            f"{_WHO}: budget has stages {sorted(budget)}, and this rank holds {list(stages)}; add {missing}"
        )
    own = {budget[stage] for stage in stages}
    if len(own) > 1:
        raise ValueError(
            f"{_WHO}: stages {list(stages)} share this rank's device and its memory; give them one and the same budget, "
            f"not {sorted(map(str, own))}"
        )
    return own.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedRank:
    """The plan of this rank, and what was measured of it."""

    plan: RankPlan
    applied: tuple[AppliedPlan, ...]  # one for each stage
    measured: StepMeasure | None  # of the whole schedule; None: no plan was needed, and none measured


@dataclasses.dataclass
class _Seen:
    """What a stage was called with for its first micro-batch, and what its backward began with."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    output_gradients: dict[int, Any] = dataclasses.field(default_factory=dict)  # by number of the output
    loss_args: Any = None  # a tuple: what the loss function gets beside the output
    loss_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_run: bool = False


class PipelineFit:
    """One fit, of stages to which nothing is applied. ``run_step`` runs the whole schedule once."""

    def __init__(
        self,
        schedule: Any,
        stages: Sequence[Any],
        order: Order,
        budget: int | str,
        *,
        blocks: str | Sequence[str] | None,
        run_step: Callable[[], Any],
    ) -> None:
        self._schedule = schedule
        self._stages = {stage.stage_index: stage for stage in stages}
        self._order = order
        self._budget = budget
        self._blocks = blocks
        self._run_step = run_step
        self._backend = planner_backend()
        self._world: World = self._backend.world() or OneProcess()
        self._first_of_group = 0  # the first rank that holds the same stages
        self._planning: RankPlanning | None = None
        self._left_bytes: dict[int, int] = {}  # by stage: what a finished micro-batch leaves behind until the step ends
        self._margin = 0
        self._misses = 0

    def run(self) -> FittedRank:
        """Profile, plan, measure, and apply what held. On failure no stage is changed."""
        with contextlib.ExitStack() as guards:
            for stage in self._stages.values():
                guards.enter_context(self._backend.guarded(stage.submod, who=_WHO))
            seen = self._observed()
            profiles, budget = self._profiled(seen)
            plan, measured = self._searched(profiles, budget)
        return FittedRank(plan=plan, applied=self._applied(plan, measured), measured=measured)

    # ------------------------------------------------------------------ one micro-batch

    def _observed(self) -> dict[int, _Seen]:
        """A step of the whole schedule under ``boundary``. It also makes the gradients, which all later steps find."""
        seen = {index: _Seen() for index in self._stages}
        handles = []
        loss_fn = self._schedule._loss_fn
        for index, stage in self._stages.items():
            hooks = _Hooks(seen[index])
            handles.append(stage.submod.register_forward_pre_hook(hooks.before, with_kwargs=True))
            handles.append(stage.submod.register_forward_hook(hooks.after))

        def watched_loss(output: Any, *args: Any, **kwargs: Any) -> Any:
            for index, stage in self._stages.items():
                if stage.is_last and seen[index].has_run and seen[index].loss_args is None:
                    seen[index].loss_args, seen[index].loss_kwargs = args, kwargs
            return loss_fn(output, *args, **kwargs)

        self._schedule._loss_fn = watched_loss
        try:
            with Treated(Treatment(blocks=self._blocks), [stage.submod for stage in self._stages.values()]):
                self._run_step()
        finally:
            self._schedule._loss_fn = loss_fn
            for handle in handles:
                handle.remove()
        return seen

    def _micro_step(self, index: int, seen: _Seen) -> Callable[[], None]:
        """Forward and backward of one micro-batch through one stage, as the schedule runs them."""
        stage, loss_fn = self._stages[index], self._schedule._loss_fn
        backward = needed("torch.autograd", who=_WHO).backward

        def step() -> None:
            output = stage.submod(*_as_leaves(seen.args), **_as_leaves(seen.kwargs))
            if stage.is_last:
                loss_fn(output, *(seen.loss_args or ()), **seen.loss_kwargs).backward()
                return
            outputs = _tensors(output)
            wanted = [number for number, each in enumerate(outputs) if each.requires_grad]
            gradients = [seen.output_gradients.get(number) for number in wanted]
            for number, gradient in zip(wanted, gradients):
                if gradient is None:  # no later stage uses this output
                    seen.output_gradients[number] = outputs[number].detach().clone().zero_()
            backward([outputs[number] for number in wanted], [seen.output_gradients[number] for number in wanted])

        return step

    def _left_behind(self, index: int, seen: _Seen) -> int:
        """torch's schedules hold every loss until the step ends, and a loss holds a part of its graph."""
        meter = self._meter()
        stage, loss_fn = self._stages[index], self._schedule._loss_fn
        before = int(meter.active_bytes())
        loss = loss_fn(
            stage.submod(*_as_leaves(seen.args), **_as_leaves(seen.kwargs)), *seen.loss_args, **seen.loss_kwargs
        )
        loss.backward()
        meter.wait()
        return max(0, int(meter.active_bytes()) - before)

    def _profiled(self, seen: Mapping[int, _Seen]) -> tuple[dict[int, Profile], int]:
        """The profile of each stage, for the worst of the ranks that hold the same stages; and the least budget of those."""

        def work() -> tuple[tuple[int, ...], dict[int, Profile], int]:
            first = next(iter(self._stages.values())).submod
            budget = parse_budget(self._budget, memory=lambda: self._backend.device_memory(first, who=_WHO))
            profiles = {
                index: self._backend.profile_memory(
                    stage.submod,
                    self._micro_step(index, seen[index]),
                    blocks=self._blocks,
                    steps=2,
                    is_guarded=True,
                    agrees=lambda here: all(self._world.gather(here)),
                )
                for index, stage in self._stages.items()
            }
            self._left_bytes = {
                index: self._left_behind(index, seen[index])
                for index, stage in self._stages.items()
                if stage.is_last and profiles[index].measured.under == "none"
            }
            return tuple(self._stages), profiles, budget

        rows = together(self._world, work)
        held = [row[0] for row in rows]
        self._first_of_group = held.index(tuple(self._stages))
        own = [row for row in rows if row[0] == tuple(self._stages)]
        profiles = {index: worst_of([row[1][index] for row in own]) for index in self._stages}
        return profiles, min(row[2] for row in own)

    # ------------------------------------------------------------------ plans

    def _searched(self, profiles: Mapping[int, Profile], budget: int) -> tuple[RankPlan, StepMeasure]:
        best: tuple[RankPlan, StepMeasure] | None = None
        plan = self._agreed_plan(profiles, budget)
        for attempt in range(_ATTEMPTS):
            measured = self._measured(plan)
            fits = measured.peak_bytes <= budget
            is_better = best is None or plan.busy_seconds < best[0].busy_seconds or best[1].peak_bytes > budget
            if fits and is_better:
                best = plan, measured
            predicted = plan.plan.predicted_peak_bytes
            agrees = fits and (plan.plan.does_nothing or abs(measured.peak_bytes - predicted) <= _TOLERANCE * predicted)
            is_done = agrees or (best is not None and attempt > 1)
            if all(self._world.gather(is_done)):
                break
            self._learn(plan, measured, budget)
            again = self._agreed_plan(profiles, budget)
            plan = (best[0] if best is not None else plan) if is_done else again
        return self._held(best, plan, measured, budget)

    def _held(
        self, best: tuple[RankPlan, StepMeasure] | None, plan: RankPlan, measured: StepMeasure, budget: int
    ) -> tuple[RankPlan, StepMeasure]:
        """What kept the budget on this rank; where a rank has none, all raise."""
        missed = None if best is not None else (tuple(self._stages), budget, measured.peak_bytes)
        rows = [row for row in self._world.gather(missed) if row is not None]
        if rows:
            stages, wanted, peak = rows[0]
            error = BudgetTooSmallError(
                f"{_WHO}: {show_bytes(wanted)} was not kept by stages {list(stages)} in {_ATTEMPTS} attempts; the last one "
                f"took {show_bytes(peak)}. Raise the budget, or make the micro-batches smaller."
            )
            error.smallest_peak_bytes = peak
            raise error
        assert best is not None, "all ranks have one"
        return best

    def _agreed_plan(self, profiles: Mapping[int, Profile], budget: int) -> RankPlan:
        """Planned by the first of the ranks that hold the same stages."""
        own = tuple(self._stages)

        def work() -> RankPlan | BudgetTooSmallError | None:
            if self._first_of_group != self._world.rank:
                return None
            self._planning = self._planning or RankPlanning(profiles, self._order, left_bytes=self._left_bytes)
            try:
                return self._planning.plan(budget, margin_bytes=self._margin)
            except BudgetTooSmallError as error:
                return error

        answers = together(self._world, work)
        for answer in answers:
            if isinstance(answer, BudgetTooSmallError):
                raise answer
        return next(answer for answer in answers if isinstance(answer, RankPlan) and answer.stages == own)

    def _learn(self, plan: RankPlan, measured: StepMeasure, budget: int) -> None:
        if self._planning is not None:
            self._planning.learn(plan.plan, measured)
        over = measured.peak_bytes - budget
        if over > 0:  # asked for just what was missing, the search may find it in its model alone
            self._misses += 1
            self._margin = 0 if self._misses == 1 else over << (self._misses - 2)

    # ------------------------------------------------------------------ trials

    def _measured(self, plan: RankPlan) -> StepMeasure:
        """The whole schedule, each rank under its plan; the worst of the ranks with the same stages."""
        meter = self._meter()
        applied = self._applied(plan, None)
        try:
            answer = measure(self._run_step, meter, steps=1, warmup=1)
        finally:
            for handle in applied:
                handle.remove()
        rows = [row for stages, row in self._world.gather((plan.stages, answer)) if stages == plan.stages]
        return dataclasses.replace(answer, peak_bytes=max(row.peak_bytes for row in rows))

    def _meter(self) -> Any:
        from hyper_parallel.backends.torch.planner.blocks import device_of
        from hyper_parallel.backends.torch.planner.meters import meter_for

        return meter_for(device_of(next(iter(self._stages.values())).submod, _WHO), who=_WHO)

    def _applied(self, plan: RankPlan, measured: StepMeasure | None) -> tuple[AppliedPlan, ...]:
        found: list[AppliedPlan] = []
        try:
            for index, part in zip(plan.stages, plan.of_stages):
                found.append(self._apply_one(index, part, measured))
        except BaseException:
            for handle in found:
                handle.remove()
            raise
        return tuple(found)

    def _apply_one(self, index: int, plan: Plan, measured: StepMeasure | None) -> AppliedPlan:
        applied = self._backend.apply_plan(self._stages[index].submod, plan)
        applied.measured = measured
        return applied


class _Hooks:
    """Hooks on a stage's module that write down its first micro-batch."""

    def __init__(self, seen: _Seen) -> None:
        self._seen = seen

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Its arguments. They are held as they are: a stage keeps them in buffers of its own."""
        if self._is_first():
            self._seen.args, self._seen.kwargs = args, kwargs

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """The gradients that its backward begins with."""
        if not self._is_first():
            return
        self._seen.has_run = True
        for number, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._keep_gradient, number))

    def _is_first(self) -> bool:
        """Before the first micro-batch torch may run the module to learn shapes: that is no pass of the schedule."""
        return not self._seen.has_run and SwapManager().turns.packing is not None

    def _keep_gradient(self, number: int, gradient: Any) -> None:
        self._seen.output_gradients[number] = gradient.detach()


def _tensors(output: Any) -> list[Any]:
    if hasattr(output, "requires_grad"):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    elif not isinstance(output, list | tuple):
        return []
    return [tensor for item in output for tensor in _tensors(item)]


def _as_leaves(values: Any) -> Any:
    """The same tensors without their gradients, so that a backward of ours ends at them."""
    if hasattr(values, "requires_grad"):
        return values.detach().requires_grad_(values.requires_grad)
    if isinstance(values, Mapping):
        return {name: _as_leaves(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_as_leaves(value) for value in values)
    return values
