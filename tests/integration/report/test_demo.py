"""The demo, as a newcomer runs it: outside the repository, all four ways, gradients equal, a report at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hyper_parallel.records.run_record import RunRecord, StepRecord

COMMAND = [sys.executable, "-m", "hyper_parallel.cli", "demo"]
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}


def run(folder: Path, *arguments: str) -> str:
    environment = {**ALLOCATOR, **os.environ, "HYPER_PARALLEL_PLATFORM": "torch"}
    done = subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_four_ways_one_table_one_report(tmp_path: Path) -> None:
    said: Any = json.loads(run(tmp_path, "--size", "tiny", "--steps", "1", "--disk-path", str(tmp_path), "--json"))
    assert said["are_gradients_equal"] is True
    assert [way["name"] for way in said["ways"]] == ["none", "recompute", "swap", "auto"]
    assert all(way["losses"] == said["ways"][0]["losses"] for way in said["ways"])
    assert len(set(said["ways"][0]["losses"])) == 3, "it trains: one step warms up, one is timed, one is watched"
    assert all(len(way["seconds"]) == 1 for way in said["ways"]), "each way is timed once in every round"
    assert said["memory_kind"] == ("device memory" if torch.cuda.is_available() else "resident memory of the model")
    assert said["ways"][2]["out_bytes"] > 0
    folder = tmp_path / "hyper-parallel-demo"
    found = {path.name for path in folder.iterdir()}
    assert found == {"run.json", "plan.json", "profile.json", "report.html", "figure.svg", "trace.json"}
    record = RunRecord.load(folder / "run.json")
    assert record.steps[-1].predicted is not None
    assert record.budget_line_bytes == record.budget_bytes, "line, budget and peaks are of the same bytes"
    assert {path.name for path in tmp_path.iterdir()} == {"hyper-parallel-demo"}, "a swap file was left behind"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA machine the demo measures device memory instead")
def test_swapping_to_disk_takes_two_fifths_off_the_resident_peak(tmp_path: Path) -> None:
    for way in ("none", "swap"):
        run(tmp_path, "--one", way, "--size", "host", "--steps", "1", "-o", "out", "--disk-path", str(tmp_path))
    none, swap = (StepRecord.load(tmp_path / "out" / f"{way}.json") for way in ("none", "swap"))
    assert swap.peak_bytes <= 0.6 * none.peak_bytes
    assert none.gradients == swap.gradients
    assert none.losses == swap.losses
    assert swap.out_bytes > 400 * 2**20
    assert none.out_bytes == 0
