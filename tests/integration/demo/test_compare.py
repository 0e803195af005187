"""The demo, as a newcomer runs it: on a machine without an accelerator real memory falls, and gradients stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]


def run_mode(mode: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.compare", "--mode", mode, "--steps", "1", "--disk-path", str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CUDA machine the demo measures device memory instead")
def test_swapping_to_disk_takes_two_fifths_off_the_resident_peak(tmp_path: Path) -> None:
    none, swap, mixed = (run_mode(mode, tmp_path) for mode in ("none", "swap", "mixed"))
    assert swap["peak_bytes"] <= 0.6 * none["peak_bytes"], (none, swap)
    assert mixed["peak_bytes"] <= 0.6 * none["peak_bytes"], (none, mixed)
    assert none["gradients"] == swap["gradients"] == mixed["gradients"]
    assert none["losses"] == swap["losses"] == mixed["losses"]
    assert swap["swapped_bytes"] > 500 * 2**20
    assert none["swapped_bytes"] == 0
    assert list(tmp_path.iterdir()) == [], "a swap file was left behind"
