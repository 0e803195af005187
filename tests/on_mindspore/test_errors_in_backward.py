"""An error of MindSpore's own in a backward that asks us for values. In a process of its own, because it ended the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = """
import mindspore, numpy as np
from mindspore import mint
import hyper_parallel as hp
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.testing import simulated_accelerator

def loss(x):
    value = x * 1.0
    read = mint.sin(value)
    out = mint.sum(hp.swap(mint.square, read))
    value.copy_(value * 0.5)  # sin has saved it
    return out + mint.sum(value)

x = mindspore.Tensor(np.ones((5, 8), np.float32))
with simulated_accelerator(window_bytes=0, tail_bytes=0, min_bytes=0):
    for _ in range(2):
        try:
            mindspore.grad(loss)(x)
        except RuntimeError as error:
            print("modified by an inplace operation" in str(error))
        compat.end_failed_gradient()
    print(hp.stats().swapped_in_bytes > 0, hp.stats().live_records)
"""


def test_an_error_of_the_plain_step_stays_an_error() -> None:
    run = subprocess.run(
        [sys.executable, "-c", STEP],
        cwd=ROOT,
        env={**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["True", "True", "True 0"]
