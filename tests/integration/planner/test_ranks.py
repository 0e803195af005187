"""Two processes: one plan for both, made for the one that needs more; DDP and FSDP2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .ranks import LIMIT_S, PASSED, WORLD_SIZE


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_agree_on_one_plan(kind: str, tmp_path: Path) -> None:
    package = __package__ or ""
    search = Path(__file__).resolve().parents[package.count(".") + 1]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(search), str(search.parents[1])]),
        "HYPER_PARALLEL_PLATFORM": "torch",
        "OMP_NUM_THREADS": "1",
    }
    outputs = [(tmp_path / f"output-{rank}").open("w+") for rank in range(WORLD_SIZE)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"{package}.ranks", kind, str(tmp_path), str(rank)],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for output in outputs:
        output.close()
    for rank in range(WORLD_SIZE):
        verdict = tmp_path / f"verdict-{rank}"
        text = verdict.read_text() if verdict.exists() else "no verdict"
        assert text == PASSED, f"rank {rank}: {text}\n{(tmp_path / f'output-{rank}').read_text()}"
