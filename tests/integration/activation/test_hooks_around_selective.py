"""Our hooks around torch's own selective checkpointing: no warning, no other number, and the caller's answer counts."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.platform.torch import compat
from hyper_parallel.testing import simulated_accelerator

from .models import WIDTH, Block
from .scenario import batch

TIGHT: dict[str, Any] = {"window_bytes": 0, "prefetch_bytes": 0, "min_bytes": 0}
SAVES_PRODUCTS = functools.partial(torch_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.gelu.default])
needs_the_option = pytest.mark.skipif(
    not compat.TAKES_RESPECT_HOOKS, reason="torch's checkpoint takes respect_saved_tensors_hooks from 2.15 on"
)


def _selective(block: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return hp.checkpoint(block, x, context_fn=SAVES_PRODUCTS, **options)


CALLS = {
    "inputs swapped": lambda block, x: _selective(block, x, swap_inputs=True),
    "inside a swap": lambda block, x: hp.swap(lambda value: _selective(block, value), x),
    "with a policy of ours": lambda block, x: _selective(
        block, x, swap_inputs=True, policy_fn=lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE
    ),
    "inside a checkpoint inside a swap": lambda block, x: hp.swap(
        lambda value: hp.checkpoint(lambda inner: _selective(block, inner), value), x
    ),
}


def _gradients(block: torch.nn.Module, x: torch.Tensor, output: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output.sum(), [x, *block.parameters()]))


@pytest.mark.parametrize("call", CALLS)
def test_our_hooks_around_torchs_selective_checkpoint_raise_no_warning(call: str) -> None:
    block, x = Block(), batch()
    wanted = _gradients(block, x, block(x))
    with simulated_accelerator(**TIGHT), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = _gradients(block, x, CALLS[call](block, x))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted))


@needs_the_option
@pytest.mark.parametrize("respects", [True, False])
def test_the_caller_may_send_what_torch_saves_through_our_hooks(respects: bool) -> None:
    block, x = Block(), batch()
    wanted = _gradients(block, x, block(x))
    swapped = []
    for option in ({}, {"respect_saved_tensors_hooks": respects}):
        with simulated_accelerator(**TIGHT) as sim:
            got = _gradients(block, x, _selective(block, x, swap_inputs=True, **option))
            swapped.append(sim.swapped_bytes)
        assert all(torch.equal(one, other) for one, other in zip(got, wanted))
    assert (swapped[1] > swapped[0]) is respects


@needs_the_option
@pytest.mark.parametrize("min_bytes", [0, 10**6], ids=["swapped", "kept"])
def test_a_change_of_what_torch_saved_through_our_hooks_is_never_silent(min_bytes: int) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    made: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, weight)
        made.append(product)
        return product.sin()

    saves_products = functools.partial(torch_contexts, [torch.ops.aten.mm.default])
    with simulated_accelerator(**{**TIGHT, "min_bytes": min_bytes}):
        out = hp.swap(
            lambda x: torch_checkpoint(
                function, x, use_reentrant=False, context_fn=saves_products, respect_saved_tensors_hooks=True
            ),
            torch.randn(4, WIDTH),
        )
        with torch.no_grad():
            made[0].add_(1)
        with pytest.raises(InPlaceChangeError, match="was changed"):
            out.sum().backward()
