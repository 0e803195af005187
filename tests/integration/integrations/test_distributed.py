"""DDP, FSDP2 and torch's pipelines on two gloo processes, with and without us; and what their adapters refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hyper_parallel.integrations import ddp, pipelining

from .pipelines import PIPELINE_CHECKS
from .ranks import CHECKS, FSDP1, LIMIT_S, WORLD_SIZE, Stack


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """All checks in one launch: importing torch costs more than most of them."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder)]
    outputs = [(folder / f"output-{rank}").open("w") for rank in range(WORLD_SIZE)]
    processes = [
        subprocess.Popen(
            [*program, str(rank), *CHECKS, FSDP1, *PIPELINE_CHECKS], env=environment, stdout=output, stderr=output
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # the missing verdicts say so
    finally:
        for process, output in zip(processes, outputs):
            process.kill()
            process.wait()
            output.close()
    found = []
    for rank in range(WORLD_SIZE):
        path, output_text = folder / f"verdicts-{rank}", (folder / f"output-{rank}").read_text()[-3000:]
        missing = dict.fromkeys(
            [*CHECKS, FSDP1, *PIPELINE_CHECKS], f"no verdict of rank {rank}; it said:\n{output_text}"
        )
        found.append(missing | (json.loads(path.read_text()) if path.exists() else {}))
    return found


@pytest.mark.timeout(LIMIT_S + 60)  # the first test waits for the launch of all
@pytest.mark.parametrize("check", [*CHECKS, FSDP1, *PIPELINE_CHECKS])
def test_on_two_ranks(verdicts: list[dict[str, str]], check: str) -> None:
    for rank, verdict in enumerate(verdicts):
        assert verdict[check] == "passed", f"rank {rank}: {verdict[check]}"


def test_what_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(TypeError, match="use DistributedDataParallel"):
        ddp.apply(nn.DataParallel(Stack(0)))
    with pytest.raises(TypeError, match="expected a schedule, a PipelineStage or a list of them, got Stack"):
        pipelining.apply(Stack(0))
    with pytest.raises(TypeError, match="expected a schedule, a PipelineStage or a list of them, got list"):
        pipelining.apply([])
    assert not torch.distributed.is_initialized()
