"""What a function does to the objects it was given, and what a custom Function writes on its node, is the user's business."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .kinds import mixed_policy
from .scenario import batch


def _layer(x: torch.Tensor, aux: list[torch.Tensor], seen: dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer with an auxiliary loss: the caller adds up the list, and reads the dict, afterwards."""
    h = x.sin()
    aux.append(h.square().mean())
    seen["h"] = h
    return h.exp()


def _loss(y: torch.Tensor, aux: list[torch.Tensor], seen: dict[str, torch.Tensor]) -> torch.Tensor:
    return y.sum() + 3 * sum(aux, start=torch.zeros(())) + seen["h"].cos().sum()


@pytest.mark.parametrize("policy", [None, mixed_policy], ids=["whole", "mixed"])
@pytest.mark.parametrize("swap_inputs", [False, True])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_list_and_a_dict_that_the_function_fills(policy: Any, swap_inputs: bool, by_keyword: bool) -> None:
    x = batch()
    aux: list[torch.Tensor] = []
    seen: dict[str, torch.Tensor] = {}
    (wanted,) = torch.autograd.grad(_loss(_layer(x, aux, seen), aux, seen), x)
    aux, seen = [], {}
    keywords: dict[str, Any] = {"swap_inputs": swap_inputs, "policy_fn": policy}
    with simulated_accelerator():
        if by_keyword:
            y = hp.checkpoint(_layer, x=x, aux=aux, seen=seen, **keywords)
        else:
            y = hp.checkpoint(_layer, x, aux, seen, **keywords)
        (got,) = torch.autograd.grad(_loss(y, aux, seen), x)
    assert torch.equal(got, wanted)


def test_a_replay_of_swapped_inputs_fills_lists_of_its_own() -> None:
    aux: list[torch.Tensor] = []
    with simulated_accelerator():
        hp.checkpoint(_layer, batch(), aux, {}, swap_inputs=True).sum().backward()
    assert len(aux) == 1


def test_torchs_own_debug_mode_with_swapped_inputs() -> None:
    x = batch()
    with simulated_accelerator():
        hp.checkpoint(torch.sin, x, swap_inputs=True, debug=True).sum().backward()
    assert torch.equal(x.grad, x.cos())


class _Named(torch.autograd.Function):
    """Its context is its node: names written on it hide the node's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.name = "layer"
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_a_custom_function_that_calls_its_context_names() -> None:
    x = batch()
    with simulated_accelerator():
        hp.swap(lambda x: _Named.apply(x).sin(), x).sum().backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
