"""Many steps on MindSpore: the process does not grow by what its steps saved.

MindSpore 2.10 never frees a graph in which an older primitive is given a leaf that is not an input of the differentiated
function. The inputs of a region were such leaves in a replay. No Python object shows it, so resident memory is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn

import hyper_parallel as hp

from .resident_memory import LAST_STEP, SAVED_BYTES, WARM_STEP, WAYS, NormBlock

ROOT = Path(__file__).parents[2]
MOST_KEPT_STEPS = (LAST_STEP - WARM_STEP) // 4
"""A leak keeps the saved values of all of these steps; what the allocator adds is less than a tenth of that."""


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_resident_memory_does_not_grow_by_what_the_steps_saved(way: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.on_mindspore.resident_memory", way],
        cwd=ROOT,
        env={**os.environ, "HYPER_PARALLEL_PLATFORM": "mindspore", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.splitlines()[-1]) < MOST_KEPT_STEPS * SAVED_BYTES


def _inputs() -> dict[str, Any]:
    whole = mindspore.Tensor(np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32))
    return {"whole": whole, "transposed": whole.T, "sliced": whole[3:7]}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", ["whole", "transposed", "sliced"])
def test_the_gradient_of_an_input_is_that_of_the_plain_step(way: str, kind: str) -> None:
    block, x = NormBlock(), _inputs()[kind]
    parameters = block.trainable_params()

    def gradients(net: Any) -> list[bytes]:
        step = mindspore.value_and_grad(lambda x: (net(x) ** 2).mean(), 0, parameters)
        loss, (of_input, of_parameters) = step(x)
        return [value.asnumpy().tobytes() for value in (loss, of_input, *of_parameters)]

    expected = gradients(block)
    assert gradients(WAYS[way](block)) == expected
    assert gradients(hp.checkpoint_wrapper(WAYS[way](block), policy_fn=["Dense", "MatMul"])) == expected


def test_forward_gets_the_tensor_of_the_caller() -> None:
    given, seen = [], []

    class Region(nn.Cell):
        def construct(self, x: Any) -> Any:
            seen.append(x)
            return x * x

    region = hp.checkpoint_wrapper(Region())

    def loss(x: Any) -> Any:
        given.append(x)
        return region(x).sum()

    gradient = mindspore.grad(loss)(mindspore.Tensor(np.float32([1.0, 2.0])))
    assert seen[0] is given[0]
    assert len(seen) == 2
    assert gradient.asnumpy().tolist() == [2.0, 4.0]
