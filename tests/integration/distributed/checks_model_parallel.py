"""Tensor parallelism with DTensor activations, and torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hyper_parallel import stats
from hyper_parallel.testing import simulated_accelerator

from .launch import World
from .parts import WRAPS, Block, Wrap, assert_same, batch, gradients, loss_of, stack, swapping, wrap_blocks

MICRO_BATCHES = 4


def _tensor_parallel(wrap: Wrap | None, *, wraps_first: bool, shards_sequence: bool) -> Any:
    model = stack(dropout=0.0)
    mesh = init_device_mesh("cpu", (2,))
    if wrap is not None and wraps_first:
        wrap_blocks(model, wrap)
    for block in model.blocks:
        if shards_sequence:
            plan: dict[str, Any] = {
                "norm": SequenceParallel(sequence_dim=0),
                "up": ColwiseParallel(input_layouts=Shard(0)),
                "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
            }
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    if shards_sequence:
        entry = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False)
        exit_ = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
        parallelize_module(model, mesh, {"enter": entry, "leave": exit_})
    if wrap is not None and not wraps_first:
        wrap_blocks(model, wrap)
    return model


def _check_tensor_parallel(world: World, *, shards_sequence: bool) -> None:
    def step(model: Any) -> dict[str, torch.Tensor]:
        for part in range(2):
            loss_of(model(batch(0, part))).backward()  # ranks of a tensor-parallel group see the same data
        return gradients(model)

    for wraps_first in (True, False):
        wanted = step(_tensor_parallel(None, wraps_first=wraps_first, shards_sequence=shards_sequence))
        for name, wrap in WRAPS.items():
            model = _tensor_parallel(wrap, wraps_first=wraps_first, shards_sequence=shards_sequence)
            with simulated_accelerator(timing="lazy", window_bytes=256):
                got = step(model)
                kept = stats().kept_count
            assert_same(got, wanted, f"{name}, wrapped {'before' if wraps_first else 'after'}")
            if shards_sequence:
                assert kept.get("no_plain_storage", 0) > 0 or stats().swapped_out_bytes > 0, f"{name}: {stats()}"


def check_tensor_parallel(world: World) -> None:
    _check_tensor_parallel(world, shards_sequence=False)


def check_tensor_and_sequence_parallel(world: World) -> None:
    _check_tensor_parallel(world, shards_sequence=True)


def check_local_tensors_of_a_tensor_parallel_model_are_swapped(world: World) -> None:
    wanted_model = _tensor_parallel(None, wraps_first=True, shards_sequence=False)
    loss_of(wanted_model(batch(0))).backward()
    wanted = gradients(wanted_model)
    model = _tensor_parallel(WRAPS["swap"], wraps_first=True, shards_sequence=False)
    with swapping("swap"):
        loss_of(model(batch(0))).backward()
        got = gradients(model)
    assert_same(got, wanted, "swap")


def check_tensor_parallel_inside_fsdp(world: World) -> None:
    """A two-dimensional mesh of one by two: parameters are DTensors of both."""

    def step(wrap: Wrap | None) -> dict[str, torch.Tensor]:
        model = stack(dropout=0.0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        if wrap is not None:
            wrap_blocks(model, wrap)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        loss_of(model(batch(0))).backward()
        return gradients(model)

    wanted = step(None)
    for name, wrap in WRAPS.items():
        with simulated_accelerator(timing="lazy", window_bytes=256):
            got = step(wrap)
        assert_same(got, wanted, name)


class _Part(nn.Module):
    """A pipeline stage of two blocks."""

    def __init__(self, number: int, wrap: Wrap | None) -> None:
        super().__init__()
        torch.manual_seed(50 + number)
        blocks = [Block() for _ in range(2)]
        self.blocks = nn.ModuleList(blocks if wrap is None else [wrap(block) for block in blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _pipeline(world: World, schedule: Any, stages_per_rank: int, wrap: Wrap | None) -> dict[str, torch.Tensor]:
    count = world.size * stages_per_rank
    numbers = range(world.rank, count, world.size)
    parts = [_Part(number, wrap) for number in numbers]
    stages = [
        PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers, strict=True)
    ]
    pipeline = schedule(stages if stages_per_rank > 1 else stages[0], MICRO_BATCHES, loss_fn=_pipeline_loss)
    found: dict[str, torch.Tensor] = {}
    torch.manual_seed(10 + world.rank)
    for step in range(2):
        arguments = (batch(0, step),) if world.rank == 0 else ()
        is_last = world.rank == world.size - 1
        losses: list[torch.Tensor] = []
        pipeline.step(*arguments, target=batch(5, step) if is_last else None, losses=losses if is_last else None)
        for index, loss in enumerate(losses):
            found[f"loss {step} {index}"] = loss.detach().clone()
    for number, part in zip(numbers, parts, strict=True):
        found |= {f"{number}.{name}": gradient for name, gradient in gradients(part).items()}
    return found


def _pipeline_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _check_pipeline(world: World, schedule: Callable[..., Any], stages_per_rank: int) -> None:
    wanted = _pipeline(world, schedule, stages_per_rank, None)
    for name, wrap in WRAPS.items():
        with swapping(name):
            got = _pipeline(world, schedule, stages_per_rank, wrap)
        assert_same(got, wanted, name)


def check_pipeline_gpipe(world: World) -> None:
    _check_pipeline(world, ScheduleGPipe, 1)


def check_pipeline_1f1b(world: World) -> None:
    _check_pipeline(world, Schedule1F1B, 1)


def check_pipeline_interleaved_1f1b(world: World) -> None:
    _check_pipeline(world, ScheduleInterleaved1F1B, 2)
