"""A function's value and its gradients, in the form that MindSpore has: torch keeps gradients on tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["value_and_grad"]


def value_and_grad(
    function: Callable[..., Any], grad_position: int | tuple[int, ...] | None, weights: Iterable[torch.Tensor] | None
) -> Callable[..., tuple[Any, Any]]:
    """See ``TorchStreamMembers.value_and_grad``."""
    if grad_position is None and weights is None:
        raise ValueError("value_and_grad: nothing to differentiate by; give grad_position, weights, or both")
    positions = (
        () if grad_position is None else (grad_position if isinstance(grad_position, tuple) else (grad_position,))
    )
    held = [] if weights is None else list(weights)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves = {place: _leaf(args, place) for place in positions}
        with torch.enable_grad():
            value = function(*(leaves.get(place, given) for place, given in enumerate(args)), **kwargs)
        wanted = [*(leaves[place] for place in positions), *held]
        if value.requires_grad:
            found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
                value, wanted, torch.ones_like(value), allow_unused=True
            )
        else:
            found = tuple(None for _ in wanted)
        grads = tuple(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(wanted, found))
        of_inputs: Any = grads[: len(positions)]
        of_inputs = of_inputs if isinstance(grad_position, tuple) else next(iter(of_inputs), None)
        of_weights = grads[len(positions) :]
        if weights is None:
            return value.detach(), of_inputs
        return value.detach(), of_weights if grad_position is None else (of_inputs, of_weights)

    return differentiated


def _leaf(args: tuple[Any, ...], place: int) -> torch.Tensor:
    given = args[place] if 0 <= place < len(args) else None
    if not isinstance(given, torch.Tensor) or not (given.is_floating_point() or given.is_complex()):
        raise TypeError(
            f"value_and_grad: argument {place} is {type(given).__name__} and has no gradient; name the places of tensors "
            "of a floating dtype in grad_position"
        )
    return given.detach().requires_grad_()
