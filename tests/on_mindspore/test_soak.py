"""Many steps on MindSpore: no tensor outlives its step.

MindSpore 2.10's own ``recompute(use_reentrant=False)`` keeps one tensor per block and step for ever. Every region of ours runs
through that function with contexts and hooks of ours, and must not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn

import hyper_parallel as hp
from hyper_parallel.backends.mindspore.checkpointing import framework_checkpoint
from hyper_parallel.testing import simulated_accelerator

from .models import Block
from .scenario import batch

FIRST_STEPS = 20
STEPS = 200


class _Net(nn.Cell):
    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.CellList([wrap(Block()) for _ in range(2)])

    def construct(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class _By(nn.Cell):
    """Calls its block through a function."""

    def __init__(self, block: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block = block
        self.call = call

    def construct(self, x: Any) -> Any:
        return self.call(self.block, x)


def living_tensors() -> int:
    """How many tensors exist. The type is asked, not the object: a dead weak proxy raises at any question."""
    gc.collect()
    return sum(issubclass(type(thing), mindspore.Tensor) for thing in gc.get_objects())


def tensors_left_by_steps(wrap: Callable[[Any], Any]) -> int:
    """How many more tensors live after the last step than after the first few."""
    net = _Net(wrap)
    step = mindspore.value_and_grad(net, None, net.trainable_params())
    x = batch()
    for _ in range(FIRST_STEPS):
        step(x)
    before = living_tensors()
    for _ in range(STEPS):
        step(x)
    return living_tensors() - before


WAYS: dict[str, Callable[[Any], Any]] = {
    "checkpoint_wrapper": hp.checkpoint_wrapper,
    "swap_inputs": lambda block: hp.checkpoint_wrapper(block, swap_inputs=True),
    "selective": lambda block: hp.checkpoint_wrapper(block, policy_fn=["MatMul", "Dense"]),
    "swap_wrapper": hp.swap_wrapper,
    "checkpoint": lambda block: _By(block, hp.checkpoint),
    "checkpoint of the platform": lambda block: _By(block, framework_checkpoint),
    "checkpoint in checkpoint": lambda block: _By(hp.checkpoint_wrapper(block), hp.checkpoint),
}


@pytest.mark.parametrize(
    ("way", "is_simulated"),
    [*((way, False) for way in WAYS), ("swap_inputs", True), ("selective", True), ("swap_wrapper", True)],
)
def test_two_hundred_steps_leave_no_tensor_behind(way: str, is_simulated: bool) -> None:
    if not is_simulated:
        assert tensors_left_by_steps(WAYS[way]) == 0
        return
    with simulated_accelerator(window_bytes=0, prefetch_bytes=300):
        assert tensors_left_by_steps(WAYS[way]) == 0
        assert hp.stats().live_records == 0


def test_one_tensor_kept_in_each_step_is_counted() -> None:
    kept: list[Any] = []

    def keeps(block: Any, x: Any) -> Any:
        kept.append(mindspore.Tensor(np.zeros(1, np.float32)))
        return block(x)

    assert tensors_left_by_steps(lambda block: _By(block, keeps)) == 2 * STEPS
