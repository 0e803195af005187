"""A backward that returns what it saved: the gradient must not be the saved bytes while a graph still needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch

_LARGE_TAIL = 2**20


class _Precomputed(torch.autograd.Function):
    """Its gradient is made in forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return (weight * gradient).sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


def _loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _Precomputed.apply(weight, x * 2)  # type: ignore[no-any-return]


def _twice(run: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    weight, x = torch.nn.Parameter(batch().detach()), batch().detach() + 1
    loss = run(_loss, weight, x)
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    weight.grad.zero_()
    loss.backward()
    return weight.grad, x * 2


@pytest.mark.parametrize("tail_bytes", [0, _LARGE_TAIL])
@pytest.mark.parametrize("swap_inputs", [False, True])
def test_swapped_and_zeroed_between_two_backwards(tail_bytes: int, swap_inputs: bool) -> None:
    with simulated_accelerator(tail_bytes=tail_bytes):
        got, wanted = _twice(lambda *given: hp.checkpoint(*given, swap_inputs=True) if swap_inputs else hp.swap(*given))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("answer", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP], ids=lambda kind: kind.name)
def test_a_region_whose_kept_bytes_became_a_gradient_makes_them_again(answer: CheckpointPolicy) -> None:
    def run(function: Any, *given: Any) -> torch.Tensor:
        return hp.checkpoint(function, *given, policy_fn=lambda *_, **__: answer)  # type: ignore[no-any-return]

    with simulated_accelerator(tail_bytes=_LARGE_TAIL):
        got, wanted = _twice(run)
        assert hp.stats().replayed_ops["changed_outside"] == 1
    assert torch.equal(got, wanted)


class _WritesWhatItSaved(torch.autograd.Function):
    """As tensor-parallel cross entropy does to spare memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y.mul_(gradient)  # type: ignore[no-any-return]


def test_a_backward_that_changes_what_it_saved_runs_once_and_not_twice() -> None:
    x = batch()
    with simulated_accelerator(tail_bytes=_LARGE_TAIL):
        loss = hp.swap(_WritesWhatItSaved.apply, x) * 3
        (got,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(got, x.exp() * 3)
        with pytest.raises(InPlaceChangeError, match="was changed in place"):
            torch.autograd.grad(loss, x)
