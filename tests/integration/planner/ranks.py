"""One rank of a distributed fit: ``python -m <package>.ranks KIND FOLDER RANK``; writes its verdict into the folder."""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import PlanError
from hyper_parallel.testing import simulated_accelerator

from .models import LENGTH, VOCABULARY, Transformer

WORLD_SIZE: Final = 2
LIMIT_S: Final = 600
PASSED: Final = "passed"
SHARE: Final = 0.6


def parallel_model(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = Transformer(3)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def gathered(value: Any) -> list[Any]:
    rows: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(rows, value)
    return rows


def gradients(model: nn.Module, step: Any) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11 + dist.get_rank())
    step()
    found = {name: getattr(p.grad, "_local_tensor", p.grad).clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def fit(kind: str, rank: int) -> None:
    """All ranks agree on one plan, keep the budget, and have the gradients of the plain run."""
    model = parallel_model(kind)
    batch = 3 if rank == 0 else 5  # rank 1 needs more memory and decides
    ids = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    wanted = gradients(model, step)
    with simulated_accelerator() as sim:
        step()
        sim.reset_peak()
        rest = sim.live_bytes
        step()
        peak = sim.peak_bytes
        model.zero_grad(set_to_none=True)
        peaks, rests = gathered(peak), gathered(rest)
        assert peaks[1] > peaks[0], "rank 1 has the larger batch"
        budget = rests[1] + int(SHARE * (peaks[1] - rests[1]))
        applied = hp.fit_memory(model, step, budget, steps=1)
        plans = gathered(applied.plan)
        assert plans[0] == plans[1]
        assert not applied.plan.does_nothing
        assert applied.measured.peak_bytes <= budget
        step()
        sim.reset_peak()
        step()
        assert sim.peak_bytes <= budget, f"{sim.peak_bytes} of {budget}"
        got = gradients(model, step)
        applied.remove()
    assert wanted.keys() == got.keys()
    different = [name for name in wanted if not torch.equal(wanted[name], got[name])]
    assert not different, different
    two_models(model, step, rank)


def two_models(model: nn.Module, step: Any, rank: int) -> None:
    """Ranks that cannot have one plan all stop, with the reason."""
    with simulated_accelerator():
        profile = dataclasses.replace(hp.profile_memory(model, step, steps=1), model_fingerprint=f"model {rank}")
        with pytest.raises(PlanError, match=r"the ranks hold 2 different models"):
            hp.fit_memory(model, step, "1MiB", steps=1, profile=profile)


def main(kind: str, place: Path, rank: int) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "meeting"), WORLD_SIZE)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    verdict = PASSED
    try:
        fit(kind, rank)
    except BaseException:
        verdict = traceback.format_exc()
    (place / f"verdict-{rank}").write_text(verdict)
    if verdict != PASSED:
        os._exit(1)  # the other rank may wait in a collective: there is no orderly way out
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
