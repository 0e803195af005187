"""The commands on a user's own model, as a newcomer runs them: in another directory, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.backends.torch import native
from hyper_parallel.planner.plan import Plan
from hyper_parallel.records.run_record import RunRecord

MODEL = """
import torch

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def make():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2048, 128)
    return model, lambda: model(x).square().mean().backward()

def other_batches():
    torch.manual_seed(0)
    model, batches = Model(), iter(torch.randn(99, 2048, 128))
    return model, lambda: model(next(batches)).square().mean().backward()

def wrong():
    model, x = Model(), torch.randn(2048, 128)
    def forward(self, x):  # a replay of it gives something else
        factor = 1 if torch._C._current_graph_task_id() == -1 else 2
        return x + self.down(torch.nn.functional.gelu(self.up(x) * factor))
    Layer.forward = forward
    return model, lambda: model(x).square().mean().backward()

def broken():
    model, x = Model(), torch.randn(8, 3)
    return model, lambda: model(x).sum().backward()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL)
    return tmp_path


def run(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hyper_parallel.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def said(folder: Path, *arguments: str) -> Any:
    return json.loads(run(folder, *arguments, "--json")[0])


def test_from_a_model_to_a_plan_to_a_report(folder: Path) -> None:
    profile = said(folder, "profile", "my_model:make", "--simulate", "--steps", "1")
    assert profile["blocks"] == 4
    budget = int(0.9 * profile["peak_bytes"])
    plan = said(folder, "plan", "--profile", "profile.json", "--budget", str(budget), "--effort", "0.2")
    assert plan["predicted"]["peak_bytes"] <= budget
    assert Plan.load(folder / "plan.json").budget_bytes == budget
    bench = (
        "bench",
        "my_model:make",
        "--simulate",
        "--steps",
        "1",
        "--ways",
        "none,recompute,auto",
        "--budget",
        str(budget),
    )
    ways = said(folder, *bench)["ways"]
    peaks = {way["name"]: way["peak_bytes"] for way in ways}
    assert peaks["auto"] <= budget
    assert peaks["recompute"] < peaks["none"]
    of_blocks = {"count": 4, "names": [f"layers.{at}" for at in range(4)]}
    how = {} if native.load() is not None else {"reason": f"no native recorder: {native.why_not()}"}
    assert [way["regions"] for way in ways[:2]] == [[], [of_blocks | how]]
    record = RunRecord.load(folder / "run.json")
    assert len(record.steps[0].gradients) == 64
    assert {step.gradients for step in record.steps} == {record.steps[0].gradients}
    assert record.steps[-1].predicted is not None
    assert record.steps[-1].ops
    out, _ = run(folder, "report", "run.json", "--svg", "figure.svg", "--trace", "trace.json")
    assert "report.html" in out
    shown = "from a tape" if native.load() is not None else "Python again: no native recorder: "
    assert f"recompute: 4 regions run {shown}" in " ".join(out.split())
    assert shown.split(":")[0] in (folder / "report.html").read_text()
    assert {"report.html", "figure.svg", "trace.json"} <= {path.name for path in folder.iterdir()}


def test_bench_names_the_way_whose_gradients_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")  # a replay from a tape runs none of this Python, and is right
    out, err = run(folder, "bench", "my_model:wrong", "--simulate", "--steps", "1", code=1)
    assert "the first step's gradients of recompute differ from those of none" in err
    assert "DIFFERENT" in out
    assert (folder / "run.json").exists()


def test_bench_does_not_compare_what_does_not_repeat(folder: Path) -> None:
    out, _ = run(folder, "bench", "my_model:other_batches", "--simulate", "--steps", "1", "--ways", "none,recompute")
    assert "gradients were not compared: the first way does not repeat its own" in " ".join(out.split())
    assert "DIFFERENT" not in out


def test_a_model_on_the_cpu_is_told_what_to_do(folder: Path) -> None:
    _, err = run(folder, "plan", "my_model:make", "--budget", "1GiB", code=1)
    assert "there is no device memory to plan" in err
    _, err = run(folder, "bench", "my_model:make", code=1)
    assert "count bytes with --simulate" in err


def test_a_step_that_raises_is_the_users_and_named_so(folder: Path) -> None:
    _, err = run(folder, "profile", "my_model:broken", "--simulate", code=1)
    assert "the step of my_model:broken raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in err
