"""Two threads run backward through one retained graph: torch allows it, and its own checkpoint is right there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch.graph import is_in_backward

from .helpers import run_in_threads
from .scenario import batch


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_replay_that_another_thread_interrupts(policy: CheckpointPolicy) -> None:
    """The first replay stands still in its middle while a second one of the same region runs from start to end."""
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    is_inside, may_go_on = threading.Event(), threading.Event()

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = []
        for index, weight in enumerate(weights):
            x = (x @ weight).sin()
            values.append(x.cos())  # a node of its own for each output: one node serves one thread at a time
            if index == 1 and is_in_backward() and not is_inside.is_set():
                is_inside.set()
                assert may_go_on.wait(timeout=6000)
        return values[0], values[3]

    def keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if "mm" in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    x = batch()
    first, last = region(x)
    wanted = torch.autograd.grad(first.sum(), x, retain_graph=True) + torch.autograd.grad(last.sum(), x)
    first, last = hp.checkpoint(region, x, policy_fn=keep_matmuls)
    got: dict[str, Any] = {}

    def interrupt() -> None:
        assert is_inside.wait(timeout=6000)
        try:
            (got["last"],) = torch.autograd.grad(last.sum(), x, retain_graph=True)
        finally:
            may_go_on.set()

    def be_interrupted() -> None:
        (got["first"],) = torch.autograd.grad(first.sum(), x, retain_graph=True)

    run_in_threads(be_interrupted, interrupt)
    assert torch.equal(got["first"], wanted[0])
    assert torch.equal(got["last"], wanted[1])
