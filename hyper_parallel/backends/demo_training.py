"""The demo's trials: a small language model, trained a few steps in one way, in a process of its own.

With an accelerator the device's memory is what counts and swapped values go to pinned host memory. Without one the device
is RAM and far memory is a file, and plans are fitted to the memory of this process; where a framework keeps the RAM that its
tensors give back, the simulated accelerator counts their bytes. A framework gives the model and says how its memory can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from hyper_parallel.backends.machine import disk_speed
from hyper_parallel.backends.planning.module_tree import Module
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.backends.step_observation.gradients import FirstGradients, add_gradients
from hyper_parallel.backends.step_observation.host_clock import timed
from hyper_parallel.backends.step_observation.host_memory import resident_bytes
from hyper_parallel.backends.step_observation.step_observer import StepObserver, find_observed_blocks
from hyper_parallel.backends.step_observation.ways import WAYS, in_one_way
from hyper_parallel.config import configure, current_config
from hyper_parallel.errors import BudgetTooSmallError, HyperParallelError
from hyper_parallel.planner.backend import framework_in_use
from hyper_parallel.planner.budget import show_setting
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.fit import fit_memory, profile_memory
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import Link, Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.run_record import PROCESS_PART, StepRecord
from hyper_parallel.simulation.accelerator import simulated_accelerator

__all__ = ["DEMO_WAYS", "SIZES", "DemoFramework", "DemoPlan", "DemoSize", "DemoTraining", "TurnTimes", "demo_training"]

DEMO_WAYS: Final = ("none", "recompute", "swap", "auto")
_EFFORT: Final = 0.3  # of the search; a few seconds on two cores
_ATTEMPTS: Final = 4  # searched plans that are measured at most
_BUDGET_SHARE: Final = 0.5  # of the step left alone
_ABOVE_SMALLEST: Final = 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSize:
    """How large the demo's model is."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    batch: int
    length: int
    unit_bytes: int = 2**20
    """Where the step is small: the smallest value that is swapped; window, tail and prefetch are so many of them."""

    def small_settings(self) -> dict[str, Any]:
        """Settings for a small step: enough in flight for two workers of a disk, little enough to be seen in the peak."""
        unit = self.unit_bytes
        return {"min_bytes": unit, "tail_bytes": 32 * unit, "window_bytes": 96 * unit, "prefetch_bytes": 64 * unit}


SIZES: Final[Mapping[str, DemoSize]] = {
    "host": DemoSize(vocabulary=512, width=128, heads=4, layers=8, batch=32, length=256),
    "device": DemoSize(vocabulary=8192, width=2048, heads=16, layers=12, batch=2, length=4096),
    "tiny": DemoSize(vocabulary=64, width=64, heads=4, layers=4, batch=4, length=512, unit_bytes=2**15),
}


class DemoFramework(Protocol):
    """One framework, as the demo trains on it."""

    observed: ObservedFramework
    frees_host_memory: bool
    """Whether RAM that tensors give back returns to the system, so that the memory of the process is that of its tensors."""
    why_simulated: str  # where it does not: why, for the report

    @property
    def sizes(self) -> Mapping[str, DemoSize]:
        """``SIZES``, or what fits this framework."""

    def has_accelerator(self) -> bool:
        """Whether swapped values have pinned memory to go to."""

    def fitting_size(self) -> str:
        """The largest size that this machine can also train left alone."""

    def num_threads(self) -> int | None:
        """How many threads of the host compute; None: it is not known."""

    def plan_resident(
        self,
        model: Module,
        step: Callable[[], Any],
        size: DemoSize,
        *,
        disk_path: str,
        peak_bytes: int,
        first_plan: Callable[[Profile], Plan],
        attempts: int,
    ) -> tuple[Profile, Plan]:
        """The step's profile, and a plan fitted to the memory of this process; asked where ``frees_host_memory``.

        ``peak_bytes``: of the model, as the step left alone came to in a process of its own.
        """

    def built(self, size: DemoSize) -> tuple[Module, Callable[[], Any]]:
        """The model, the same in every process, and its step: one forward and backward."""

    def updates(self, model: Module) -> Callable[[Any], float]:
        """A function that is given what a step returned, updates the weights, and returns the loss."""


@dataclasses.dataclass(kw_only=True)
class DemoPlan:
    """What planning the demo gave. On an accelerator ``train`` puts the plan here that was fitted and measured."""

    profile: Profile
    plan: Plan


@dataclasses.dataclass(kw_only=True)
class TurnTimes:
    """What a step took in every way, in rounds in which the ways took turns."""

    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]  # empty where it is not known, or an accelerator computes


def _nothing() -> None:
    """Steps are not counted."""


class DemoTraining:
    """The demo of one framework."""

    def __init__(self, framework: DemoFramework, on_step: Callable[[], None] = _nothing) -> None:
        self.framework = framework
        self._on_step = on_step
        self.sizes = framework.sizes
        self._observed = framework.observed

    @property
    def counts_resident_memory(self) -> bool:
        """Whether its records are of the memory of the whole process."""
        return not self.framework.has_accelerator() and self.framework.frees_host_memory

    @property
    def counts_simulated_memory(self) -> bool:
        """Whether its records are of the simulated accelerator."""
        return not self.framework.has_accelerator() and not self.framework.frees_host_memory

    def size(self, name: str | None) -> DemoSize:
        """The size of this name; None: the largest that fits."""
        return self.sizes[name or self.framework.fitting_size()]

    def _built(self, size: DemoSize) -> tuple[Module, Callable[[], Any]]:
        model, step = self.framework.built(size)

        def counted() -> Any:
            result = step()
            self._on_step()
            return result

        return model, counted

    def _configure(self, size: DemoSize, disk_path: str) -> None:
        if not self.framework.has_accelerator():
            configure(tiers="disk", disk_path=disk_path, **size.small_settings())
        elif size is not self.sizes["device"]:
            configure(**size.small_settings())  # the defaults keep all of a small step where it is

    def plan_demo(self, size: DemoSize, *, budget: str | None, disk_path: str, alone: StepRecord) -> DemoPlan:
        """Profile the demo's step and plan it for ``budget``; None: half of what it takes left alone, or what can be had.

        ``alone`` is the step left alone as it ran for itself. Where RAM is the device the plan is fitted here; else where it
        is trained.
        """
        model, step = self._built(size)
        if self.counts_resident_memory:
            profile, fitted = self.framework.plan_resident(
                model,
                step,
                size,
                disk_path=disk_path,
                peak_bytes=alone.model_peak_bytes,
                first_plan=functools.partial(_first_plan, budget=budget),
                attempts=_ATTEMPTS,
            )
            return DemoPlan(profile=profile, plan=fitted)
        corrections = None
        if self.framework.has_accelerator():
            self._configure(size, disk_path)
            profile = profile_memory(model, step, steps=2)
        else:
            profile = self._profile_on_host(size, disk_path, alone, model, step)
            corrections = _of_real_time(profile.measured.step_seconds, alone.step_seconds)
        return DemoPlan(profile=profile, plan=_first_plan(profile, budget, corrections))

    def _profile_on_host(
        self, size: DemoSize, disk_path: str, alone: StepRecord, model: Module, step: Callable[[], Any]
    ) -> Profile:
        """The simulated accelerator slows every op, and does not see what a process holds beside its tensors."""
        seconds = StepObserver(self._observed, model, step, find_observed_blocks(self._observed, model)).time_one()
        with simulated_accelerator(timing="eager", **size.small_settings()):
            profile = profile_memory(model, step, steps=1)
        speed = disk_speed(disk_path)
        link = Link(out_bytes_per_second=speed.write_bytes_per_second, in_bytes_per_second=speed.read_bytes_per_second)
        return dataclasses.replace(
            profile,
            link=link,
            far=dataclasses.replace(profile.far, host_bytes=speed.free_bytes // 2),
            measured=dataclasses.replace(profile.measured, step_seconds=seconds, peak_bytes=alone.model_peak_bytes),
        )

    def train(
        self, way: str, size: DemoSize, *, disk_path: str, steps: int, planned: DemoPlan | None = None
    ) -> StepRecord:
        """A few steps in this process, in one way."""
        self._configure(size, disk_path)
        process = {PROCESS_PART: resident_bytes()} if self.counts_resident_memory else {}
        model, step = self._built(size)
        blocks = find_observed_blocks(self._observed, model)
        plan = None if planned is None else planned.plan
        with self._counted(size), contextlib.ExitStack() as stack:
            if planned is not None and not self.counts_resident_memory:
                plan = planned.plan = self._fitted(model, step, planned)
            ledger = _Ledger(self.framework, model)
            stack.enter_context(in_one_way(self._observed, model, blocks, way, plan))
            observer = StepObserver(self._observed, model, step, blocks, base=process)
            record = observer.observe(way, what=WAYS[way].what, warmup=1, steps=steps, after=ledger)
        record = dataclasses.replace(record, losses=tuple(ledger.losses), gradients=ledger.gradients)
        if self.counts_simulated_memory:
            # What they say of times does not hold: those that are shown are taken without the simulated accelerator.
            record = dataclasses.replace(record, notes=())
        if planned is None or plan is None:
            return record
        return dataclasses.replace(
            record, ops=op_totals(planned.profile, plan), predicted=plan.predicted, notes=(*record.notes, *plan.notes)
        )

    def _fitted(self, model: Module, step: Callable[[], Any], planned: DemoPlan) -> Plan:
        """The plan, corrected until its measured peak fits. On the simulated device one that cannot is returned as it was."""
        try:
            fitted = fit_memory(
                model,
                step,
                planned.plan.budget_bytes,
                profile=planned.profile,
                plan=planned.plan,
                attempts=_ATTEMPTS,
                steps=2,
            )
        except BudgetTooSmallError:
            if self.framework.has_accelerator():
                raise
            return planned.plan
        fitted.remove()
        return fitted.plan

    def _counted(self, size: DemoSize) -> AbstractContextManager[Any]:
        """Where the bytes of this process say nothing, the simulated accelerator counts those of its tensors."""
        if not self.counts_simulated_memory:
            return contextlib.nullcontext()
        return simulated_accelerator(timing="eager", **size.small_settings())

    def time_in_turns(self, size: DemoSize, *, disk_path: str, rounds: int, plan: Plan) -> TurnTimes:
        """What a step takes in every way, in this process. Each way runs once in every round: a slow minute affects all.

        The gradients of each way's first step are compared here too: on a host this is the run that uses the disk.
        """
        self._configure(size, disk_path)
        model, step = self._built(size)
        blocks = find_observed_blocks(self._observed, model)
        observer = StepObserver(self._observed, model, step, blocks)
        threads = None if self.framework.has_accelerator() else self.framework.num_threads()
        seconds: dict[str, list[float]] = {way: [] for way in DEMO_WAYS}
        processor: dict[str, list[float]] = {} if threads is None else {way: [] for way in DEMO_WAYS}
        gradients = {way: FirstGradients(self._observed, model) for way in DEMO_WAYS}
        for _ in range(rounds):
            for way in DEMO_WAYS:
                with in_one_way(self._observed, model, blocks, way, plan if way == "auto" else None):
                    if threads is None:
                        seconds[way].append(observer.time_one(after=gradients[way]))
                        continue
                    gradients[way](step())
                    took = timed(step, threads)
                    seconds[way].append(took.wall)
                    processor[way].append(took.processor)
        expected = gradients[DEMO_WAYS[0]].fingerprint
        wrong = [way for way in DEMO_WAYS if gradients[way].fingerprint != expected]
        if wrong:
            raise HyperParallelError(f"the gradients of {', '.join(wrong)} differ from those of {DEMO_WAYS[0]}")
        return TurnTimes(seconds=seconds, processor_seconds=processor)

    def settings_in_words(self, size: DemoSize, disk_path: str) -> dict[str, str]:
        """The settings that the demo runs under."""
        self._configure(size, disk_path)
        config = current_config()
        return {
            field.name: show_setting(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)
        }


def _first_plan(profile: Profile, budget: str | None, corrections: Corrections | None = None) -> Plan:
    """For the budget that was asked for; for the default one, or a little more than the smallest peak."""
    plan = functools.partial(plan_memory, profile, corrections=corrections, effort=_EFFORT)
    if budget is not None:
        return plan(budget)
    half = int(profile.measured.peak_bytes * _BUDGET_SHARE)
    try:
        return plan(half)
    except BudgetTooSmallError as error:
        return plan(int((error.smallest_peak_bytes or half) * _ABOVE_SMALLEST))


def _of_real_time(real_seconds: float, simulated_seconds: float) -> Corrections:
    """Ops were timed on the simulated accelerator, and the disk with its real speed: ops count as if they were not slowed."""
    scale = real_seconds / simulated_seconds
    return Corrections(work_scale=scale, issue_scale=scale, region_scale=scale)


class _Ledger:
    """Losses, and one fingerprint of every gradient of every step; weights are updated after each step."""

    def __init__(self, framework: DemoFramework, model: Module) -> None:
        self._observed = framework.observed
        self._model = model
        self._update = framework.updates(model)
        self._fingerprint = hashlib.sha256()
        self.losses: list[float] = []

    def __call__(self, result: Any) -> None:
        add_gradients(self._observed, self._fingerprint, self._model, result)
        self.losses.append(self._update(result))

    @property
    def gradients(self) -> str:
        """The fingerprint of all of them."""
        return self._fingerprint.hexdigest()


def demo_training(on_step: Callable[[], None] = _nothing) -> DemoTraining:
    """The demo of the framework in use. ``on_step`` is called after every step."""
    return DemoTraining(importlib.import_module(f"hyper_parallel.backends.{framework_in_use()}.demo").DEMO, on_step)
