"""What a replay made goes with its backward, also where the graph stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.testing import simulated_accelerator

from .helpers import collector_off, storage_ref
from .scenario import batch

_MADE: list[Any] = []
"""Global: what a replay appends to a list in its reach is taken off again."""


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=["saved", "swapped"])
def test_a_kept_value_does_not_hold_the_graph_of_the_replay(policy: CheckpointPolicy) -> None:
    made = _MADE
    made.clear()

    def region(x: torch.Tensor) -> torch.Tensor:
        middle = x.sin().exp()
        if is_in_backward():
            _MADE.append(storage_ref(middle))
        return middle.tanh().cos()

    def keep_tanh(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if "tanh" in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    with collector_off(), simulated_accelerator():
        out = hp.checkpoint(region, batch(), policy_fn=keep_tanh)
        for _ in range(2):
            out.sum().backward(retain_graph=True)
        assert len(made) == 2
        assert all(reference.expired() for reference in made)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=["saved", "swapped"])
def test_a_gradient_inside_a_region(answer: CheckpointPolicy, early_stop: bool) -> None:
    """A penalty or a meta step: torch replays the region while its forward still runs."""
    asked: list[Any] = []

    def every_second(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return answer if len(asked) % 2 else CheckpointPolicy.MUST_RECOMPUTE

    def region(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        again = slope.detach().requires_grad_()
        return slope * torch.autograd.grad(again.sin().exp().sum(), again)[0]

    x = batch()
    (wanted,) = torch.autograd.grad(region(x * 2).sum(), x)
    with simulated_accelerator(window_bytes=0):
        y = hp.checkpoint(region, x * 2, policy_fn=every_second, early_stop=early_stop)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=["saved", "swapped"])
def test_a_gradient_inside_a_region_within_another_checkpoint(answer: CheckpointPolicy) -> None:
    """The outer one is replayed while an inner forward is open, and its ops are nobody's that is open."""

    def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return answer if "mul" in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    def region(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((x * 2).sin().sum(), x, create_graph=True)
        return (slope * slope * 0.5).tanh()

    def stacked(x: torch.Tensor) -> torch.Tensor:
        once = hp.checkpoint(region, x, policy_fn=keep_products)
        return hp.checkpoint(region, once, policy_fn=keep_products)  # type: ignore[no-any-return]

    x = batch()
    (wanted,) = torch.autograd.grad(region(region(x)).sum(), x)
    with simulated_accelerator(window_bytes=0):
        (got,) = torch.autograd.grad(hp.checkpoint(stacked, x).sum(), x)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "answer", [hp.CheckpointPolicy.MUST_SAVE, hp.CheckpointPolicy.MUST_SWAP], ids=lambda one: one.name
)
@pytest.mark.python_replay
def test_a_replay_that_runs_ahead_of_forward_leaves_its_values_alone(answer: hp.CheckpointPolicy) -> None:
    """A gradient inside forward replays the region to its end, past the change in place that forward has not come to yet."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        leaf = made.detach().requires_grad_()
        (slope,) = torch.autograd.grad(leaf.sin().exp().sum(), leaf)
        made.detach().add_(slope)
        return made.sin()

    x = torch.linspace(-1, 1, 64).requires_grad_()
    wanted = hp.checkpoint(forward, x, early_stop=False)
    with simulated_accelerator(min_bytes=0):
        got = hp.checkpoint(forward, x, policy_fn=lambda *_, **__: answer, early_stop=False)
    assert torch.equal(got, wanted)
