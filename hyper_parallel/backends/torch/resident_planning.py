"""Budgets of resident memory: without an accelerator RAM is the device, and a file is far memory.

Bytes of single values are counted on the simulated accelerator, which sees every tensor. Seconds and peaks are measured on
the machine itself: the step left alone, the step with every block swapped, and every plan that is tried. A copy to a file is
made by the processor that computes. What the swapped step takes beyond its simulation is therefore counted as compute's time,
in proportion to the bytes: a simulation in which copies hide behind compute would call every swap free.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.machine import disk_speed, memory_copy_bytes_per_second
from hyper_parallel.backends.step_observation.host_clock import HostSeconds, are_contended, timed
from hyper_parallel.backends.step_observation.host_memory import HostMeter
from hyper_parallel.backends.step_observation.step_observer import find_observed_blocks
from hyper_parallel.backends.step_observation.ways import in_one_way
from hyper_parallel.backends.torch import planner
from hyper_parallel.backends.torch.observed_framework import FRAMEWORK
from hyper_parallel.config import configure
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.by_hand import swapped_choices
from hyper_parallel.planner.fit import fit_with_backend
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import BlockKind, Link, OpProfile, Profile, Segment
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.step_measure import StepMeasure
from hyper_parallel.simulation.accelerator import simulated_accelerator

__all__ = ["ResidentBackend", "ResidentMeter", "ResidentProfile", "fit_resident", "profile_resident", "with_copy_cost"]

_EFFORT: Final = 0.3  # of the first search; a few seconds on two cores
_FIRST_SHARE: Final = 0.94  # of the budget, for the first plan: predicted resident peaks were up to 5 % too low
_ROUNDS: Final = 2  # in which the step left alone and the swapped one take turns
_SPARE: Final = 0.03  # of a budget that a plan leaves free: resident peaks of two processes differ by so much


class ResidentMeter(HostMeter):
    """Resident memory beyond ``process_bytes``, which the process takes without the model.

    The clock is the host's. ``is_contended``: other programs have the processors, and processor time is read in its place.
    """

    def __init__(self, process_bytes: int, *, is_contended: bool = False) -> None:
        self._process_bytes = process_bytes
        self._is_contended = is_contended

    def mark(self) -> float:
        """See :class:`~hyper_parallel.backends.planning.meters.Meter`, as for all others."""
        now = HostSeconds.now(torch.get_num_threads())
        return now.processor if self._is_contended else now.wall

    def active_bytes(self) -> int:
        """See the protocol."""
        return max(0, super().active_bytes() - self._process_bytes)

    def peak_bytes(self) -> int:
        """See the protocol."""
        return max(0, super().peak_bytes() - self._process_bytes)

    def reserved_bytes(self) -> int:
        """See the protocol. What the C allocator keeps is resident too."""
        return self.peak_bytes()

    def retries(self) -> int:
        """See the protocol."""
        return 0

    def capacity_bytes(self) -> int | None:
        """See the protocol."""
        return None

    def total_bytes(self) -> int | None:
        """See the protocol."""
        return None

    def hold(self, seconds: float) -> None:
        """See the protocol. Nothing runs ahead of a host."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See the protocol."""
        return isinstance(error, MemoryError)

    def release_cached(self) -> None:
        """See the protocol."""


class ResidentBackend:
    """Torch's backend for ``fit_memory`` (see ``planner.backend``), which measures resident memory."""

    apply_plan = staticmethod(planner.apply_plan)
    apply_rules = staticmethod(planner.apply_rules)
    device_memory = staticmethod(planner.device_memory)
    identify_step = staticmethod(planner.identify_step)
    link_probe = staticmethod(planner.link_probe)
    list_ops = staticmethod(planner.list_ops)
    list_saved = staticmethod(planner.list_saved)
    profile_memory = staticmethod(planner.profile_memory)

    def __init__(self, meter: ResidentMeter) -> None:
        self._meter = meter

    def guarded(self, model: nn.Module, *, who: str) -> AbstractContextManager[None]:
        """See the protocol."""
        return planner.guarded(model, who=who)

    def world(self) -> None:
        """See the protocol: one process."""

    def measure_step(
        self,
        model: nn.Module,
        step: Callable[[], Any],
        *,
        steps: int,
        warmup: int = 2,
        is_guarded: bool = False,
        blocks: Sequence[str] = (),
    ) -> StepMeasure:
        """See the protocol."""
        return planner.measure_step(
            model, step, steps=steps, warmup=warmup, is_guarded=is_guarded, blocks=blocks, meter=self._meter
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidentProfile:
    """A step on a machine without an accelerator, and the meter that reads its peaks."""

    profile: Profile
    meter: ResidentMeter | None  # None: this system does not let a process begin a new peak


def profile_resident(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    settings: Mapping[str, Any],
    disk_path: str,
    peak_bytes: int,
) -> ResidentProfile:
    """What the step is made of. ``peak_bytes``: of the model, as the step left alone came to in a process of its own.

    ``settings`` of the engine hold from here on, as they do for the plans that will be tried.
    """
    with simulated_accelerator(timing="eager", **settings):
        profile = planner.profile_memory(model, step, steps=1)
    configure(tiers="disk", disk_path=disk_path, **settings)
    measured = _InTurns(model, step)
    alone_seconds = measured.seconds("none")
    speed = disk_speed(disk_path)
    link = Link(out_bytes_per_second=speed.write_bytes_per_second, in_bytes_per_second=speed.read_bytes_per_second)
    if measured.is_contended:  # processor time knows no waits, and others have the disk too
        rate = memory_copy_bytes_per_second()
        link = Link(out_bytes_per_second=rate, in_bytes_per_second=rate)
    profile = _scaled(profile, alone_seconds / profile.measured.step_seconds)
    profile = dataclasses.replace(
        profile,
        versions=dataclasses.replace(profile.versions, device=HostMeter.device_name),
        measured=dataclasses.replace(profile.measured, step_seconds=alone_seconds, peak_bytes=peak_bytes),
        link=link,
        far=dataclasses.replace(profile.far, host_bytes=speed.free_bytes // 2),
        device_memory=None,
    )
    meter = None
    if measured.peak_bytes is not None:
        meter = ResidentMeter(max(0, measured.peak_bytes - peak_bytes), is_contended=measured.is_contended)
    return ResidentProfile(profile=with_copy_cost(profile, measured.seconds("swap")), meter=meter)


def with_copy_cost(profile: Profile, swapped_seconds: float) -> Profile:
    """The profile whose simulation takes ``swapped_seconds`` where every block is swapped, if it took less."""
    step = StepSimulator(profile).simulate(swapped_choices(profile), profile.engine)
    moved = step.out_bytes + step.in_bytes
    missing = max(0.0, swapped_seconds - step.step_seconds)
    cost = missing / moved if moved else 0.0
    return dataclasses.replace(profile, link=dataclasses.replace(profile.link, compute_seconds_per_byte=cost))


def fit_resident(
    model: nn.Module, step: Callable[[], Any], resident: ResidentProfile, plan: Plan, *, attempts: int, steps: int
) -> Plan:
    """The plan that ``fit_memory`` answers with for the budget of ``plan``.

    ``plan`` itself, with a note, where nothing was measured to keep the budget.
    """
    if resident.meter is None or plan.does_nothing:
        return plan
    budget = within(plan.budget_bytes)
    try:
        applied = fit_with_backend(
            ResidentBackend(resident.meter),
            model,
            step,
            budget,
            profile=resident.profile,
            plan=_first_plan(resident.profile, budget),
            attempts=attempts,
            steps=steps,
            clock=resident.meter.mark,
        )
    except BudgetTooSmallError as error:  # in this process; small steps are lost in what the C allocator keeps
        return dataclasses.replace(plan, notes=(*plan.notes, f"no measured plan kept the budget: {error}"))
    applied.remove()
    return dataclasses.replace(applied.plan, budget_bytes=plan.budget_bytes)


def _first_plan(profile: Profile, budget_bytes: int) -> Plan:
    """One whose peak may come out a little higher than predicted; else trials begin with plans that miss."""
    try:
        return plan_memory(profile, int(_FIRST_SHARE * budget_bytes), effort=_EFFORT)
    except BudgetTooSmallError:
        return plan_memory(profile, budget_bytes, effort=_EFFORT)


def within(budget_bytes: int) -> int:
    """What is planned for, so that the budget is kept in another process too."""
    return int(budget_bytes * (1 - _SPARE))


class _InTurns:
    """The step left alone and with every block swapped, several times."""

    def __init__(self, model: nn.Module, step: Callable[[], Any]) -> None:
        blocks, meter = find_observed_blocks(FRAMEWORK, model), HostMeter()
        self._found: dict[str, list[HostSeconds]] = {"none": [], "swap": []}
        peaks: list[int] = []
        with planner.guarded(model, who="profile_resident"):
            for _ in range(_ROUNDS):
                for way, found in self._found.items():
                    with in_one_way(FRAMEWORK, model, blocks, way):
                        step()
                        gc.collect()
                        meter.reset_peak()
                        found.append(timed(step, torch.get_num_threads()))
                        if way == "none":
                            peaks.append(meter.peak_bytes())
        self.peak_bytes = max(peaks) if meter.can_reset_peak() else None  # of the process, left alone
        self.is_contended = are_contended([one for found in self._found.values() for one in found])

    def seconds(self, way: str) -> float:
        """By the clock that the meter has too."""
        found = self._found[way]
        return statistics.median(one.processor if self.is_contended else one.wall for one in found)


# ---------------------------------------------------------------------- seconds


def _scaled(profile: Profile, factor: float) -> Profile:
    """The profile with all seconds multiplied: the simulated accelerator slows every op by about the same factor."""
    return dataclasses.replace(
        profile,
        kinds=tuple(_scaled_kind(kind, factor) for kind in profile.kinds),
        prologue=_scaled_segment(profile.prologue, factor),
        epilogue=_scaled_segment(profile.epilogue, factor),
    )


def _scaled_kind(kind: BlockKind, factor: float) -> BlockKind:
    return dataclasses.replace(
        kind,
        ops=tuple(_scaled_op(op, factor) for op in kind.ops),
        backward_seconds=factor * kind.backward_seconds,
    )


def _scaled_op(op: OpProfile, factor: float) -> OpProfile:
    return dataclasses.replace(op, seconds=factor * op.seconds, backward_seconds=factor * op.backward_seconds)


def _scaled_segment(segment: Segment, factor: float) -> Segment:
    return dataclasses.replace(
        segment,
        forward_seconds=factor * segment.forward_seconds,
        backward_seconds=factor * segment.backward_seconds,
    )
