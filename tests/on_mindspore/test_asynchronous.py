"""MindSpore as users have it, with ops in a queue of its own; the other tests run with ops that wait for their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEP = """
import sys
import mindspore
import numpy as np
import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator
from on_mindspore.kinds import mixed_policy
from on_mindspore.models import Block, Chain

mindspore.set_device("CPU")
x = mindspore.Tensor(np.random.RandomState(0).standard_normal((64, 32)).astype(np.float32))
model = Chain([Block(32) for _ in range(3)])

def step(run):
    value, gradients = mindspore.value_and_grad(lambda x: run(x).square().mean(), 0, model.trainable_params())(x)
    return [tensor.asnumpy().tobytes() for tensor in (value, gradients[0], *gradients[1])]

plain = step(model)
files = hp.SwapConfig(min_bytes=0, tail_bytes=0, window_bytes=0, tiers=("disk",), disk_path=sys.argv[1])
for _ in range(3):
    with hp.configure(files):
        assert step(lambda x: hp.swap(model, x)) == plain, "swapped to a file"
        assert step(lambda x: hp.checkpoint(model, x, policy_fn=mixed_policy, swap_inputs=True)) == plain, "mixed"
    with simulated_accelerator("random", window_bytes=9000):
        assert step(lambda x: hp.swap(model, x)) == plain, "simulated"
assert hp.stats().swapped_in_bytes > 0
print("same")
"""


def test_values_are_right_while_ops_wait_in_a_queue(tmp_path: Path) -> None:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", STEP, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr[-2000:]
