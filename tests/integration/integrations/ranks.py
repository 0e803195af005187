"""One rank of two, as a program: every check trains three steps with and without us and writes its verdict as JSON.

python ranks.py FOLDER RANK CHECK...
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hyper_parallel import SwapManager
from hyper_parallel.integrations import ddp, fsdp, pipelining
from hyper_parallel.testing import simulated_accelerator

FSDP1 = "fsdp1_is_refused"
WIDTH, ROWS, STEPS, WORLD_SIZE, LIMIT_S, COLLECTIVE_LIMIT_S = 16, 512, 3, 2, 1100, 600
Train = Callable[[int, bool], tuple[list[float], list[nn.Module]]]  # (rank, with us) -> losses, trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, seed: int, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step))


def loop(rank: int, model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(10 + rank)
    for step in range(STEPS):
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_ddp(comes_first: bool) -> Train:
    def train(rank: int, with_us: bool) -> tuple[list[float], list[nn.Module]]:
        model = Stack(0)
        if with_us and comes_first:
            ddp.apply(model, "boundary")
        parallel = DistributedDataParallel(model)
        if with_us and not comes_first:
            ddp.apply(parallel, "boundary")
        return loop(rank, parallel), [model]

    return train


def in_ddp_with_a_budget(rank: int, with_us: bool) -> tuple[list[float], list[nn.Module]]:
    model = Stack(0)
    parallel = DistributedDataParallel(model)
    if with_us:
        # Of a plain step: four blocks of eleven rows' worth of activations, and little else.
        budget = 3 * 11 * ROWS * WIDTH * 4
        treated = ddp.apply(parallel, budget=budget, step=lambda: parallel(batch(rank, 9)).square().mean().backward())
        assert not treated._handles[0].plan.does_nothing  # type: ignore[attr-defined]
    return loop(rank, parallel), [model]


def in_fsdp(comes_first: bool) -> Train:
    def train(rank: int, with_us: bool) -> tuple[list[float], list[nn.Module]]:
        model = Stack(0)
        if with_us and comes_first:
            fsdp.apply(model, "boundary")
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if with_us and not comes_first:
            fsdp.apply(model, "boundary")
        return loop(rank, model), [model]

    return train


def in_pipeline(schedule: Any, stages_per_rank: int) -> Train:
    def train(rank: int, with_us: bool) -> tuple[list[float], list[nn.Module]]:
        count = WORLD_SIZE * stages_per_rank
        numbers = range(rank, count, WORLD_SIZE)
        parts = [Stack(50 + number, blocks=2) for number in numbers]
        stages = [PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers)]
        pipeline = schedule(stages if stages_per_rank > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
        if with_us:
            pipelining.apply(pipeline, "boundary")
        optimizer = torch.optim.AdamW([weight for part in parts for weight in part.parameters()], lr=1e-2)
        found = []
        is_last = rank == WORLD_SIZE - 1
        torch.manual_seed(10 + rank)
        for step in range(STEPS):
            losses: list[torch.Tensor] = []
            arguments = (batch(0, step),) if rank == 0 else ()
            pipeline.step(*arguments, target=batch(5, step) if is_last else None, losses=losses if is_last else None)
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(loss.item() for loss in losses))
        return found, list(parts)

    return train


CHECKS: dict[str, Train] = {
    "ddp_before": in_ddp(comes_first=True),
    "ddp_after": in_ddp(comes_first=False),
    "fsdp_before": in_fsdp(comes_first=True),
    "fsdp_after": in_fsdp(comes_first=False),
    "pipeline_1f1b": in_pipeline(Schedule1F1B, 1),
    "pipeline_interleaved_1f1b": in_pipeline(ScheduleInterleaved1F1B, 2),
    "ddp_budget": in_ddp_with_a_budget,  # the longest comes last
}


def local(weight: torch.Tensor) -> torch.Tensor:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).detach().clone()


def run(train: Train, rank: int, with_us: bool) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    SwapManager().reset()
    with simulated_accelerator() as simulation:
        losses, models = train(rank, with_us)
        weights = {f"{i}.{n}": local(w) for i, model in enumerate(models) for n, w in model.state_dict().items()}
        return losses, weights, simulation.peak_bytes, simulation.swapped_bytes


def verdict_of(name: str, rank: int) -> str:
    losses, weights, peak, _ = run(CHECKS[name], rank, with_us=False)
    our_losses, our_weights, our_peak, swapped = run(CHECKS[name], rank, with_us=True)
    if our_losses != losses or len(losses) != STEPS:
        return f"losses differ: {our_losses} instead of {losses}"
    if our_weights.keys() != weights.keys():
        return f"names differ: {sorted(our_weights.keys() ^ weights.keys())}"
    other = [key for key in weights if not torch.equal(our_weights[key], weights[key])]
    if other:
        return f"weights differ: {other}"
    if our_peak >= peak and name != "ddp_budget":  # finding a plan takes trial steps without one
        return f"the peak is {our_peak} with us and {peak} without"
    return "passed" if swapped else "nothing was swapped"


def verdict_on_fsdp1() -> str:
    try:
        fsdp.apply(FullyShardedDataParallel(Stack(0), device_id=torch.device("cpu")), "boundary")
    except TypeError as error:
        return "passed" if "shard with torch.distributed.fsdp.fully_shard (FSDP2)" in str(error) else str(error)
    return "it was not refused"


def run_check(name: str, rank: int) -> str:
    if name in CHECKS or name == FSDP1:
        return verdict_on_fsdp1() if name == FSDP1 else verdict_of(name, rank)
    from pipelines import PIPELINE_CHECKS  # beside this program

    PIPELINE_CHECKS[name](rank)
    return "passed"


def main(folder: Path, rank: int, names: list[str]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), WORLD_SIZE)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT_S)
    )
    warnings.simplefilter("error")
    # Of torch's own making: DTensor and gloo speak of their own future.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    verdicts: dict[str, str] = {}
    for name in names:
        try:
            verdicts[name] = run_check(name, rank)
        except Exception:
            verdicts[name] = traceback.format_exc()
        (folder / f"verdicts-{rank}").write_text(json.dumps(verdicts))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
