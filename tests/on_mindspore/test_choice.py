"""Both frameworks are installed and neither was chosen: a command runs on the framework of its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = """
def of_torch():
    import torch

    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU()) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    return model, lambda: model(torch.ones(2, 8)).square().sum().backward()


def of_mindspore():
    import mindspore
    from mindspore import mint, nn

    layers = [nn.SequentialCell([mint.nn.Linear(8, 8), nn.SiLU()]) for _ in range(4)]
    model = nn.SequentialCell(layers)
    grad_fn = mindspore.value_and_grad(lambda x: mint.square(model(x)).sum(), None, model.trainable_params())
    return model, lambda: grad_fn(mint.ones((2, 8)))
"""


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_a_command_runs_on_the_framework_of_its_model(tmp_path: Path, framework: str) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    environment = {name: value for name, value in os.environ.items() if name != "HYPER_PARALLEL_PLATFORM"}
    environment |= {"PYTHONPATH": str(ROOT), "HYPER_PARALLEL_NATIVE": "0"}
    bench = ["bench", f"models:of_{framework}", "--simulate", "--steps", "1", "--ways", "none,recompute"]
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", *bench],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("bitwise equal") == 2
    assert json.loads((tmp_path / "run.json").read_text())["versions"]["framework"] == framework
