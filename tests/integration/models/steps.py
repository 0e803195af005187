"""One training step, and what two steps are compared by."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a step made."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def seeded_step(
    model: Any,
    batch: dict[str, Any],
    *,
    seed: int = 7,
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    before_backward: Callable[[], None] = lambda: None,
) -> Result:
    """Forward and backward from a fixed random state; gradients are taken out and cleared."""
    torch.manual_seed(seed)
    with around_forward():
        loss = model(**batch).loss
    before_backward()
    loss.backward()
    return Result(loss=loss.detach().clone(), gradients=taken_gradients(model))


def taken_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients by name, cleared from the model."""
    gradients = {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return gradients


def assert_bitwise_equal(got: Result, wanted: Result) -> None:
    """Loss and every gradient, bit by bit; a gradient that is missing on one side only is a difference."""
    differences = [] if torch.equal(got.loss, wanted.loss) else [f"loss {got.loss} instead of {wanted.loss}"]
    assert got.gradients.keys() == wanted.gradients.keys()
    for name, expected in wanted.gradients.items():
        actual = got.gradients[name]
        if (actual is None) != (expected is None):
            differences.append(f"{name}: {'no gradient' if actual is None else 'a gradient'} on one side only")
        elif actual is not None and expected is not None and not torch.equal(actual, expected):
            differences.append(f"{name}: off by up to {(actual - expected).abs().max()}")
    assert not differences, "\n".join(differences)
    assert any(gradient is not None and bool(gradient.any()) for gradient in wanted.gradients.values())
