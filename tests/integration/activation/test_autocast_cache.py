"""Autocast remembers the cast of every leaf that wants a gradient, not of parameters alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy


def _save_casts(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "_to_copy" in str(op) else CheckpointPolicy.MUST_RECOMPUTE


def test_a_leaf_that_autocast_has_cached_takes_no_other_values_cast() -> None:
    """The replay casts ``x`` where forward did not: it must not be handed the cast of ``y``, which has the same shape."""
    torch.manual_seed(0)
    x, y, before, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(4))
    weight = torch.nn.Parameter(weight.detach())

    def region(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + (y * 1).to(torch.bfloat16)

    def gradients(run: Any) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            out = F.linear(x, before) + run(x, y)
        return torch.autograd.grad(out.float().sum(), (x, y, before, weight))

    wanted = gradients(region)
    got = gradients(lambda *inputs: hp.checkpoint(region, *inputs, policy_fn=_save_casts))
    assert all(map(torch.equal, got, wanted))
