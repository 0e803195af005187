"""What libraries do to modules (compile them, patch their forward, change their class) works on a wrapped one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.wrappers import ActivationWrapper
from hyper_parallel.testing import simulated_accelerator

WRAP: dict[str, Callable[[nn.Module], Any]] = {"checkpoint": hp.checkpoint_wrapper, "swap": hp.swap_wrapper}
wrapped_both_ways = pytest.mark.parametrize("wrap", WRAP.values(), ids=WRAP)


def _block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def _gradients(module: Any) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    parameters = list(module.parameters())
    return list(torch.autograd.grad(module(x).square().sum(), parameters))


def _same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(left, right) for left, right in zip(one, two))


@wrapped_both_ways
def test_compiled_in_place(wrap: Callable[[nn.Module], Any]) -> None:
    wanted, module = _gradients(_block()), wrap(_block())
    module.compile(backend="eager")
    with simulated_accelerator():
        assert _same(_gradients(module), wanted)


@wrapped_both_ways
def test_a_forward_patched_around_the_old_one(wrap: Callable[[nn.Module], Any]) -> None:
    wanted, module = _gradients(_block()), wrap(_block())
    old, calls = module.forward, []

    def forward(*args: Any) -> Any:
        calls.append(1)
        return old(*args)

    module.forward = forward
    with simulated_accelerator() as sim:
        assert _same(_gradients(module), wanted)
    assert calls
    assert wrap is hp.checkpoint_wrapper or sim.swapped_bytes > 0


@wrapped_both_ways
def test_a_parametrization_stays_with_its_module(wrap: Callable[[nn.Module], Any]) -> None:
    torch.manual_seed(0)
    plain = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    torch.manual_seed(0)
    module = torch.nn.utils.parametrizations.weight_norm(wrap(nn.Linear(8, 8)))
    assert "weight" not in vars(nn.Linear)
    assert list(dict(module.named_parameters())) == list(dict(plain.named_parameters()))
    with simulated_accelerator():
        assert _same(_gradients(module), _gradients(plain))
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert type(module.wrapped_module) is nn.Linear
    assert "weight" in dict(module.named_parameters())


@wrapped_both_ways
def test_the_mode_is_that_of_the_wrapped_module(wrap: Callable[[nn.Module], Any]) -> None:
    module = wrap(nn.Dropout(0.5))
    module.training = False
    assert not module.wrapped_module.training
    assert torch.equal(module(torch.ones(99)), torch.ones(99))
    module.wrapped_module.train()
    assert module.training
    nn.Module.__setattr__(module, "training", False)  # as a subclass's super() does
    assert not module.wrapped_module.training
    assert copy.deepcopy(module.eval()).training is False


@wrapped_both_ways
def test_a_copy_of_a_wrapped_graph_module_is_wrapped(wrap: Callable[[nn.Module], Any]) -> None:
    module = wrap(torch.fx.symbolic_trace(_block()))
    wanted = _gradients(module)
    again = copy.deepcopy(module)
    assert issubclass(type(again), ActivationWrapper)
    assert again.wrapped_module is not module.wrapped_module
    with simulated_accelerator():
        assert _same(_gradients(again), wanted)
