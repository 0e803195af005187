"""Sparse and nested values inside a selective region: kept, replayed, counted, never in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2).to_sparse() * 3).to_dense().sin()


def _nested(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1].exp(), x[1:].exp()], layout=torch.jagged)
    return (rows * 2).sin().values().cos()


@pytest.mark.parametrize(
    ("function", "saved"),
    # Torch's own checkpoint refuses to recompute all of a nested chain: the ragged size is another symbol.
    [(_sparse, ""), (_sparse, "mul"), (_sparse, "nothing"), (_nested, ""), (_nested, "mul")],
)
def test_b8_a_region_with_exotic_tensors(function: Any, saved: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    x = batch()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    with simulated_accelerator():
        (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=policy).sum(), x)
    assert torch.equal(got, wanted)
