"""Checks of pipelines on two ranks: every schedule's order, swapped bytes without a miss, and budgets. Run by ``ranks.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from hyper_parallel import SwapManager, stats
from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.integrations import pipelining
from hyper_parallel.integrations.pipeline_schedules import order_of
from hyper_parallel.planner.pipeline_order import check_order, interleaved_order, most_in_flight
from hyper_parallel.testing import DeviceSpeed, simulated_accelerator

ROWS, WIDTH, MICRO_BATCHES, WORLD_SIZE = 128, 16, 4, 2
NAMES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SPEED = DeviceSpeed(flops_per_second=5e9, memory_bytes_per_second=5e9, link_bytes_per_second=1e9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Part(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pipeline:
    """This rank's stages under one of torch's schedules."""

    def __init__(self, name: str, rank: int) -> None:
        kind = getattr(schedules, name, None) or getattr(torch_pipelining, name)
        is_single = issubclass(kind, schedules.PipelineScheduleSingle)
        count = WORLD_SIZE if is_single else 2 * WORLD_SIZE
        numbers = [rank] if is_single else [rank, count - 1 - rank if name in V_SHAPED else rank + WORLD_SIZE]
        self.parts = [Part(number) for number in numbers]
        stages = [PipelineStage(part, n, count, torch.device("cpu")) for part, n in zip(self.parts, numbers)]
        self.schedule = kind(stages[0] if is_single else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        made = torch.Generator().manual_seed(1)
        batch, wanted = (torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=made) for _ in range(2))
        self.inputs = (batch,) if 0 in numbers else ()
        self.target = wanted if count - 1 in numbers else None

    def step(self) -> None:
        losses: list[torch.Tensor] | None = None if self.target is None else []
        self.schedule.step(*self.inputs, target=self.target, losses=losses, return_outputs=False)

    def gradients(self) -> list[torch.Tensor]:
        """Of one step, from zeros that are there already."""
        for part in self.parts:
            for weight in part.parameters():
                if weight.grad is not None:
                    weight.grad.zero_()
        self.step()
        return [weight.grad.clone() for part in self.parts for weight in part.parameters() if weight.grad is not None]


def check_orders(rank: int) -> None:
    """What is read of each schedule is what it runs."""
    for name in NAMES:
        if not hasattr(schedules, name):
            continue
        pipeline = Pipeline(name, rank)
        order = order_of(pipeline.schedule)
        check_order(order, who=name)
        ran: list[tuple[str, int, int]] = []
        stages = getattr(pipeline.schedule, "_stages", None) or [pipeline.schedule._stage]
        for stage in stages:
            _listen(stage, ran)
        pipeline.step()
        wanted = [("F" if action.kind.value == "F" else "B", action.stage, action.micro_batch) for action in order]
        halves = {(action.stage, action.micro_batch) for action in order if action.kind.value == "I"}
        seen = [row for row in ran if row[0] in "FB"]
        if name in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
            assert halves or rank == 0, name
        assert [row for row in seen if row[0] == "F"] == [row for row in wanted if row[0] == "F"], name
        assert len(wanted) == len(seen), f"{name}: {wanted}, and it ran {seen}"
        assert wanted == seen, f"{name}: {wanted}, and it ran {seen}"
    pipeline = Pipeline("ScheduleInterleaved1F1B", rank)
    assert order_of(pipeline.schedule) == interleaved_order(rank, WORLD_SIZE, 2, MICRO_BATCHES)
    assert sum(most_in_flight(order_of(Pipeline("Schedule1F1B", rank).schedule)).values()) == WORLD_SIZE - rank


def _listen(stage: Any, ran: list[tuple[str, int, int]]) -> None:
    """All of the first stage's backward runs in the second half of a split one."""

    def wrap(name: str, letter: Callable[[dict[str, Any]], str]) -> None:
        function = getattr(stage, name)

        def call(number: int, *args: Any, **kwargs: Any) -> Any:
            ran.append((letter(kwargs), stage.stage_index, number))
            return function(number, *args, **kwargs)

        setattr(stage, name, call)

    wrap("forward_one_chunk", lambda kwargs: "F")
    wrap("backward_one_chunk", lambda kwargs: "-" if stage.is_first and not kwargs.get("full_backward", True) else "B")
    wrap("backward_weight_one_chunk", lambda kwargs: "B")


def check_no_misses(rank: int) -> None:
    """Swapped bytes are on their way back before their backward begins, whatever the schedule; gradients are the same bits."""
    for name in NAMES:
        if not hasattr(schedules, name):
            continue
        SwapManager().reset()
        wanted = Pipeline(name, rank).gradients()
        with simulated_accelerator():
            pipeline = Pipeline(name, rank)
            with pipelining.apply(pipeline.schedule, "swap"):
                pipeline.step()  # torch learns shapes in it, by backwards that no schedule names
                before = stats()
                got = pipeline.gradients()
                found = stats().since(before)
            assert found.swapped_in_bytes > 0, f"{name}: nothing came back"
            assert found.misses == 0, f"{name}: {found.misses} misses"
            assert "step" not in vars(pipeline.schedule), "the watch was taken off"
        _assert_same(got, wanted, name)


def _assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    assert len(got) == len(wanted), what
    assert all(map(torch.equal, got, wanted)), what


def _peak(pipeline: Pipeline, device: Any) -> tuple[int, list[torch.Tensor]]:
    pipeline.gradients()
    device.reset_peak()
    found = pipeline.gradients()
    return device.peak_bytes, found


def check_budget(name: str, share: float) -> Callable[[int], None]:
    """Each stage keeps its budget, bitwise and without a miss."""

    def check(rank: int) -> None:
        SwapManager().reset()
        settings: dict[str, Any] = {"speed": SPEED, "tail_bytes": None, "window_bytes": None}
        with simulated_accelerator(**settings) as device:
            plain = Pipeline(name, rank)
            plain.step()
            rest = device.live_bytes
            peak, wanted = _peak(plain, device)
        budget = rest + int(share * (peak - rest))
        budgets: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(budgets, budget)
        with simulated_accelerator(**settings) as device:
            pipeline = Pipeline(name, rank)
            stages = getattr(pipeline.schedule, "_stages", None) or [pipeline.schedule._stage]
            by_stage = {stage: budgets[stage % WORLD_SIZE] for stage in range(stages[0].num_stages)}
            treated = pipelining.apply(pipeline.schedule, budget=by_stage)
            pipeline.step()  # under the preset, while nothing is known yet
            assert treated.fitted is None
            pipeline.step()
            assert treated.fitted is not None
            plan = treated.fitted.plan
            assert plan.most_in_flight == most_in_flight(order_of(pipeline.schedule))
            assert plan.fitting >= 1, plan.summary()
            assert f"the budget holds {plan.fitting}" in treated.summary()
            assert not plan.plan.does_nothing, plan.summary()
            before = stats()
            kept, got = _peak(pipeline, device)
            found = stats().since(before)
            assert kept <= budget, f"{kept} of {budget}, predicted {plan.plan.predicted_peak_bytes}"
            assert found.misses == 0, f"{found.misses} misses"
            _assert_same(got, wanted, name)
            treated.remove()
            assert not treated.applied

    return check


def check_refusals(rank: int) -> None:
    """One stage's budget is too small: every rank raises that error, and no stage is changed."""
    with simulated_accelerator():
        pipeline = Pipeline("Schedule1F1B", rank)
        before = [id(module) for part in pipeline.parts for module in part.modules()]
        with pytest.raises(BudgetTooSmallError, match="stage 1: "):
            pipelining.apply(pipeline.schedule, budget={0: "1GiB", 1: 1000}, step=pipeline.step)
        assert before == [id(module) for part in pipeline.parts for module in part.modules()]
        assert all(weight.grad is None for part in pipeline.parts for weight in part.parameters())
        assert "step" not in vars(pipeline.schedule)
        pipeline.step()
        if rank == 1:  # before anything is communicated
            _refused(PlanError, "step=... did not run the schedule", pipeline, budget="1GiB", step=lambda: None)
        _refused(ValueError, "add \\[", pipeline, budget={7: "1GiB"})
        own = type("MySchedule", (schedules.Schedule1F1B,), {})
        pipeline.schedule.__class__ = own
        _refused(PlanError, "cannot plan a budget for MySchedule", pipeline, budget="1GiB")


def _refused(kind: type[Exception], words: str, pipeline: Pipeline, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        pipelining.apply(pipeline.schedule, **options)


PIPELINE_CHECKS: dict[str, Callable[[int], None]] = {
    "pipeline_orders": check_orders,
    "pipeline_no_misses": check_no_misses,
    "pipeline_refusals": check_refusals,
    "pipeline_budget_1f1b": check_budget("Schedule1F1B", 0.85),
    "pipeline_budget_interleaved": check_budget("ScheduleInterleaved1F1B", 0.6),
}
