"""What a newcomer types first, on a machine with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_the_demo_trains_four_ways_and_the_gradients_agree(tmp_path: Path) -> None:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "hyper_parallel.cli", "demo", "--size", "host", "--steps", "1", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["device"] == torch.cuda.get_device_name()
    assert said["memory_kind"] == "device memory"
    assert said["are_gradients_equal"]
    ways = {way["name"]: way for way in said["ways"]}
    assert ways["swap"]["out_bytes"] > 0
    assert ways["swap"]["peak_bytes"] < ways["none"]["peak_bytes"]
    assert ways["auto"]["peak_bytes"] <= said["budget_bytes"]
