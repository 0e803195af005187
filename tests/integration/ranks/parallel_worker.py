"""One rank of the models of ``parallel_models.py``: a budget for each of them, one after the other."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .parallel_models import KINDS, SHARES, Parallel
from .worker import Rank, main


def collectives() -> int:
    """How many collectives the default group has begun."""
    group = dist.group.WORLD
    assert group is not None
    return int(group._get_sequence_number_for_group())


def gathered(value: Any) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value)
    return rows


def gradients(parallel: Parallel) -> dict[str, torch.Tensor]:
    found = {
        name: getattr(parameter.grad, "_local_tensor", parameter.grad).clone()
        for name, parameter in parallel.model.named_parameters()
        if parameter.grad is not None
    }
    parallel.model.zero_grad(set_to_none=True)
    return found


def budget_for(kind: str, rank: int) -> dict[str, Any]:
    """The gradients, collectives and peaks of a plain step and of one under a fitted plan."""
    parallel = KINDS[kind](rank)
    parallel.step()
    parallel.model.zero_grad(set_to_none=True)
    before = collectives()
    parallel.step()
    plain = collectives() - before
    wanted = gradients(parallel)
    with simulated_accelerator() as sim:
        parallel.step()
        rest = sim.live_bytes
        sim.reset_peak()
        parallel.step()
        peak = sim.peak_bytes
        parallel.model.zero_grad(set_to_none=True)
        peak, rest = max(gathered((peak, rest)))
        budget = rest + int(SHARES[kind] * (peak - rest))
        applied = hp.fit_memory(parallel.model, parallel.step, budget, steps=1, attempts=2)
        parallel.step()
        peaks = []
        for _ in range(3):
            gc.collect()  # FSDP2 leaves cycles behind
            sim.reset_peak()
            parallel.step()  # with the gradients of the step before: the larger case
            peaks.append(sim.peak_bytes)
        kept = min(peaks)
        parallel.model.zero_grad(set_to_none=True)
        before = collectives()
        parallel.step()
        planned = collectives() - before
        got = gradients(parallel)
        plans = gathered(applied.plan)
        applied.remove()
    return {
        "different": [name for name in wanted if not torch.equal(wanted[name], got[name])],
        "gradients": [len(wanted), len(got)],
        "collectives": [plain, planned],
        "budget": budget,
        "peak": peak,
        "kept": kept,
        "is_one_plan": all(plan == plans[0] for plan in plans),
        "does_nothing": applied.plan.does_nothing,
        "copying_ranks": [note for note in applied.plan.notes if "ranks of this host copying at once" in note],
    }


def check_budgets(rank: Rank) -> None:
    rank.join()
    found = {}
    for kind in KINDS:
        found[kind] = budget_for(kind, rank.rank)
        rank.say(found)
    gathered(None)


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
