"""The examples with other people's trainers, as a reader runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"^(\w+) +peak +([\d.]+) MiB +losses (\[.*\])$", re.MULTILINE)


@pytest.mark.parametrize(
    "name", ["transformers_trainer", "sft_lora", "lightning_fit", "fsdp2", "long_context", "lora_24gb"]
)
def test_the_same_losses_at_a_lower_peak(name: str) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if name == "fsdp2" else []
    environment = os.environ | {"HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, f"examples.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    (plain, plain_peak, plain_losses), *others = LINE.findall(done.stdout)
    assert plain == "plain"
    assert plain_losses.count(",") == 2
    assert others
    for treatment, peak, losses in others:
        assert losses == plain_losses, treatment
        assert float(peak) < float(plain_peak), treatment
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 64
