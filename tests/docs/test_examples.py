"""The examples as a reader runs them: the same losses, at a lower peak. Those with trainers: tests/integration/integrations."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .blocks import ROOT

LINE = re.compile(r"^(\w[\w ]*?) +peak +([\d.]+) MiB +losses (\[.*\])$", re.MULTILINE)
EXAMPLES = {
    "checkpoint_policy": ["plain", "recompute", "inputs", "policy"],
    "swap_limit": ["plain", "12 MiB", "8 MiB", "unset"],
    "budget": ["plain", "8MiB"],
    "rules": ["plain", "mine", "boundary"],
    "disk_tier": ["plain", "disk"],
    "dpo": ["plain", "inputs"],
    "generate_then_train": ["plain", "inputs"],
    "video_diffusion": ["plain", "attention"],
}
ELSEWHERE = {"fsdp2", "lightning_fit", "long_context", "lora_24gb", "sft_lora", "transformers_trainer"}
ON_BOTH_FRAMEWORKS = {"data_parallel", "sequence_parallel_attention", "sharded_checkpoint"}
"""Run by ``tests/contract/test_platform_examples.py``, which allows them less than 80 lines."""
_MOST_LINES = 64


def output_of(name: str) -> str:
    environment = os.environ | {"HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", f"examples.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_losses_at_a_lower_peak(name: str) -> None:
    output = output_of(name)
    rows = LINE.findall(output)
    assert [row[0] for row in rows] == EXAMPLES[name]
    (_, plain_peak, plain_losses), *others = rows
    assert plain_losses.count(",") == 2
    for treatment, peak, losses in others:
        assert losses == plain_losses, treatment
        assert float(peak) < float(plain_peak), treatment
    if name == "budget":
        assert float(others[0][1]) <= 8
        assert "1.00 MiB cannot hold this step; the smallest peak found is" in output
    if name == "swap_limit":
        peaks = [float(peak) for _, peak, _ in rows]
        assert peaks == sorted(peaks, reverse=True)


def test_every_example_is_short_and_run_somewhere() -> None:
    files = {path.stem: path for path in (ROOT / "examples").glob("*.py") if path.stem != "__init__"}
    assert set(files) == set(EXAMPLES) | ELSEWHERE | ON_BOTH_FRAMEWORKS
    lengths = {name: len(files[name].read_text().splitlines()) for name in set(files) - ON_BOTH_FRAMEWORKS}
    assert {name: length for name, length in lengths.items() if length > _MOST_LINES} == {}
