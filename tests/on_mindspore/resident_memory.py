"""Runs steps of one block and prints by how many bytes the process has grown.

Usage: ``python -m tests.on_mindspore.resident_memory <way>``, a process of its own for each way.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Final

import mindspore
import numpy as np
import psutil
from mindspore import nn, ops

import hyper_parallel as hp
from hyper_parallel.backends.mindspore.checkpointing import framework_checkpoint

__all__ = ["LAST_STEP", "SAVED_BYTES", "WARM_STEP", "WAYS", "NormBlock"]

ROWS: Final = 512
WIDTH: Final = 32
WARM_STEP: Final = 50
LAST_STEP: Final = 250
SAVED_BYTES: Final = 4 * ROWS * (WIDTH + WIDTH + 2 * WIDTH)
"""What a step saves at the least: the inputs of the LayerNorm and of the first layer, and the output of tanh."""


class NormBlock(nn.Cell):
    """A block whose first op is an older primitive, so that it is given the inputs of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(WIDTH, 2 * WIDTH)
        self.down = nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class _SwappedCheckpoint(nn.Cell):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def construct(self, x: Any) -> Any:
        return hp.swap(framework_checkpoint, self.block, x)


WAYS: Final[dict[str, Callable[[Any], Any]]] = {
    "plain": lambda block: block,
    "checkpoint_wrapper": hp.checkpoint_wrapper,
    "swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "swap of checkpoint": lambda block: hp.swap_wrapper(hp.checkpoint_wrapper(block)),
    "swap of the platform's checkpoint": _SwappedCheckpoint,
}


def _growth(wrap: Callable[[Any], Any]) -> int:
    """By how much the resident memory grows from the warm step to the last one."""
    mindspore.set_device("CPU")
    mindspore.runtime.launch_blocking()
    net = wrap(NormBlock())
    step = mindspore.value_and_grad(lambda x: net(x).mean(), None, net.trainable_params())
    rng = np.random.default_rng(0)
    before = 0
    for number in range(LAST_STEP + 1):
        loss, _ = step(mindspore.Tensor(rng.standard_normal((ROWS, WIDTH)).astype(np.float32)))
        loss.asnumpy()
        if number == WARM_STEP:
            gc.collect()
            before = psutil.Process().memory_info().rss
    gc.collect()
    return int(psutil.Process().memory_info().rss) - before


if __name__ == "__main__":
    print(_growth(WAYS[sys.argv[1]]))
