"""What can be swapped at all, and the adapters of plain callables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.backends.torch import (
    ActivationWrapper,
    FuncModule,
    SwapWrapper,
    base_check_fn,
    swap_wrapper,
)


@pytest.mark.parametrize(
    "value", [3, None, "x", nn.Parameter(torch.rand(2)), nn.Parameter(torch.rand(2, 2)).t(), torch.empty(0)]
)
def test_what_cannot_be_swapped(value: Any) -> None:
    assert base_check_fn(value) is False


@pytest.mark.parametrize(
    "value", [torch.rand(2), torch.rand(()), torch.rand(2, requires_grad=True).exp(), torch.tensor([True])]
)
def test_what_can_be_swapped(value: torch.Tensor) -> None:
    assert base_check_fn(value) is True


def test_the_base_of_wrappers_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ActivationWrapper(nn.Linear(2, 2))  # type: ignore[abstract]


def test_a_callable_is_adapted() -> None:
    wrapper = swap_wrapper(torch.sin)
    assert isinstance(wrapper, SwapWrapper)
    assert isinstance(wrapper.wrapped_module, FuncModule)
    x = torch.rand(3)
    assert torch.equal(wrapper(x), x.sin())
    assert torch.equal(FuncModule(torch.add)(x, x, alpha=2), x * 3)


@pytest.mark.parametrize("make", [FuncModule, SwapWrapper])
def test_what_cannot_be_called_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match=f"{make.__name__}: expected a .*callable, got 3"):
        make(3)
