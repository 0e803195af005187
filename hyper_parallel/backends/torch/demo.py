"""The demo's model and its trials: a small language model, trained a few steps in one way, in a process of its own.

With an accelerator the device's memory is what counts and swapped values go to pinned host memory. Without one the device
is RAM and far memory is a file: see ``resident_planning``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.backends.torch.planner.profiling import profile_memory
from hyper_parallel.backends.torch.resident_planning import fit_resident, profile_resident
from hyper_parallel.backends.torch.step_observation import (
    WAYS,
    StepObserver,
    add_gradients,
    find_observed_blocks,
    in_one_way,
)
from hyper_parallel.backends.torch.step_observation.host_clock import timed
from hyper_parallel.backends.torch.step_observation.host_memory import resident_bytes
from hyper_parallel.config import configure, current_config
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.budget import show_setting
from hyper_parallel.planner.fit import fit_memory
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.run_record import PROCESS_PART, StepRecord

__all__ = [
    "DEMO_WAYS",
    "SIZES",
    "DemoSize",
    "LanguageModel",
    "TurnTimes",
    "fitting_size",
    "has_accelerator",
    "plan_demo",
    "time_in_turns",
    "train",
]

DEMO_WAYS: Final = ("none", "recompute", "swap", "auto")
_EFFORT: Final = 0.3  # of the search; a few seconds on two cores
_ATTEMPTS: Final = 4  # searched plans that are measured at most
_BUDGET_SHARE: Final = 0.5  # of the step left alone
_ABOVE_SMALLEST: Final = 1.05
_DEVICE_SIZE_BYTES: Final = 14 * 2**30  # what the size "device" needs left alone, with a margin


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


SIZES: Final = {
    "host": DemoSize(vocabulary=512, width=128, heads=4, layers=8, batch=32, length=256),
    "device": DemoSize(vocabulary=8192, width=2048, heads=16, layers=12, batch=2, length=4096),
    "tiny": DemoSize(vocabulary=64, width=64, heads=4, layers=4, batch=4, length=512, unit_bytes=2**15),
}


class Layer(nn.Module):
    """Attention and a feed-forward part, as every decoder has them."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class LanguageModel(nn.Module):
    """Embedding, layers, head; its output is the loss of the next token."""

    def __init__(self, size: DemoSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss over a batch of token ids."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def has_accelerator() -> bool:
    """Whether swapped values have pinned memory to go to."""
    return torch.cuda.is_available()


def fitting_size() -> str:
    """The largest size that this machine can also train left alone."""
    if not has_accelerator():
        return "host"
    free_bytes, _ = torch.cuda.mem_get_info()
    return "device" if free_bytes >= _DEVICE_SIZE_BYTES else "host"


def _nothing() -> None:
    """Steps are not counted."""


def _built(size: DemoSize, on_step: Callable[[], None]) -> tuple[LanguageModel, Callable[[], float]]:
    device = torch.device("cuda" if has_accelerator() else "cpu")
    torch.set_num_threads(max(1, os.cpu_count() or 1))
    torch.manual_seed(0)
    with device:
        model = LanguageModel(size)
        ids = torch.randint(0, size.vocabulary, (size.batch, size.length))
    if has_accelerator():
        model = model.to(dtype=torch.bfloat16)
        # The ways are compared bit for bit, and attention's own backward adds in any order unless told not to.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def step() -> float:
        # Gradients stay in memory between steps, as in a run that accumulates: planner and observer count them so.
        model.zero_grad(set_to_none=False)
        loss = model(ids)
        loss.backward()
        on_step()
        return loss.detach()  # type: ignore[no-any-return]

    return model, step


def _configure(size: DemoSize, disk_path: str) -> None:
    if not has_accelerator():
        configure(tiers="disk", disk_path=disk_path, **size.small_settings())
    elif size is not SIZES["device"]:
        configure(**size.small_settings())  # the defaults keep all of a small step where it is


@dataclasses.dataclass(kw_only=True)
class DemoPlan:
    """What planning the demo gave. On an accelerator ``train`` puts the plan here that was fitted and measured."""

    profile: Profile
    plan: Plan


def plan_demo(
    size: DemoSize, *, budget: str | None, disk_path: str, alone: StepRecord, on_step: Callable[[], None] = _nothing
) -> DemoPlan:
    """Profile the demo's step and plan it for ``budget``; None: half of what it takes left alone, or what can be had.

    ``alone`` is the step left alone as it ran for itself. Without an accelerator the plan is fitted here; with one, where it
    is trained.
    """
    model, step = _built(size, on_step)
    if has_accelerator():
        _configure(size, disk_path)
        profile = profile_memory(model, step, steps=2)
        return DemoPlan(profile=profile, plan=_first_plan(profile, budget))
    resident = profile_resident(
        model, step, settings=size.small_settings(), disk_path=disk_path, peak_bytes=alone.model_peak_bytes
    )
    plan = _first_plan(resident.profile, budget)
    return DemoPlan(
        profile=resident.profile, plan=fit_resident(model, step, resident, plan, attempts=_ATTEMPTS, steps=1)
    )


def _first_plan(profile: Profile, budget: str | None) -> Plan:
    """For the budget that was asked for; for the default one, or a little more than the smallest peak."""
    if budget is not None:
        return plan_memory(profile, budget, effort=_EFFORT)
    half = int(profile.measured.peak_bytes * _BUDGET_SHARE)
    try:
        return plan_memory(profile, half, effort=_EFFORT)
    except BudgetTooSmallError as error:
        least = int((error.smallest_peak_bytes or half) * _ABOVE_SMALLEST)
        return plan_memory(profile, least, effort=_EFFORT)


class _Ledger:
    """Losses, and one fingerprint of every gradient of every step; weights are updated after each step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._fingerprint = hashlib.sha256()
        self.losses: list[float] = []

    def __call__(self, loss: Any) -> None:
        self.losses.append(float(loss))
        add_gradients(self._fingerprint, self._model)
        self._optimizer.step()

    @property
    def gradients(self) -> str:
        """The fingerprint of all of them."""
        return self._fingerprint.hexdigest()


def train(
    way: str,
    size: DemoSize,
    *,
    disk_path: str,
    steps: int,
    on_step: Callable[[], None] = _nothing,
    planned: DemoPlan | None = None,
) -> StepRecord:
    """A few steps in this process, in one way."""
    _configure(size, disk_path)
    process = {} if has_accelerator() else {PROCESS_PART: resident_bytes()}
    model, step = _built(size, on_step)
    blocks = find_observed_blocks(model)
    plan = None if planned is None else planned.plan
    if planned is not None and has_accelerator():
        fitted = fit_memory(
            model,
            step,
            planned.plan.budget_bytes,
            profile=planned.profile,
            plan=planned.plan,
            attempts=_ATTEMPTS,
            steps=2,
        )
        plan = planned.plan = fitted.plan
        fitted.remove()
    ledger = _Ledger(model)
    with in_one_way(model, blocks, way, plan):
        observer = StepObserver(model, step, blocks, base=process)
        record = observer.observe(way, what=WAYS[way].what, warmup=1, steps=steps, after=ledger)
    record = dataclasses.replace(record, losses=tuple(ledger.losses), gradients=ledger.gradients)
    if planned is None or plan is None:
        return record
    return dataclasses.replace(
        record, ops=op_totals(planned.profile, plan), predicted=plan.predicted, notes=(*record.notes, *plan.notes)
    )


@dataclasses.dataclass(kw_only=True)
class TurnTimes:
    """What a step took in every way, in rounds in which the ways took turns."""

    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]  # empty on an accelerator, whose time is its own


def time_in_turns(
    size: DemoSize, *, disk_path: str, rounds: int, plan: Plan, on_step: Callable[[], None] = _nothing
) -> TurnTimes:
    """Times in this process. Each way runs once in every round: a slow minute affects all of them."""
    _configure(size, disk_path)
    model, step = _built(size, on_step)
    blocks = find_observed_blocks(model)
    observer = StepObserver(model, step, blocks)
    seconds: dict[str, list[float]] = {way: [] for way in DEMO_WAYS}
    processor: dict[str, list[float]] = {} if has_accelerator() else {way: [] for way in DEMO_WAYS}
    for _ in range(rounds):
        for way in DEMO_WAYS:
            with in_one_way(model, blocks, way, plan if way == "auto" else None):
                if has_accelerator():
                    seconds[way].append(observer.time_one())
                    continue
                step()
                took = timed(step)
                seconds[way].append(took.wall)
                processor[way].append(took.processor)
    return TurnTimes(seconds=seconds, processor_seconds=processor)


def settings_in_words(size: DemoSize, disk_path: str) -> dict[str, str]:
    """The settings that the demo runs under."""
    _configure(size, disk_path)
    config = current_config()
    return {field.name: show_setting(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)}
