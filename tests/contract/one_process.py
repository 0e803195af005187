"""The judge of differentiable collectives: the same function, computed in one process on all ranks' inputs, in float64.

The loss is the sum over ranks of ``sum(weight_r * output_r)`` with random weights that differ between ranks, so a
gradient that came from the wrong rank, or in the wrong order, shows. torch is the judge on every platform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .worker import World

Oracle = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def compare(
    world: World, ranks: Sequence[int], inputs: list[np.ndarray], apply: Callable[[Any, Any, int], Any], oracle: Oracle
) -> None:
    """Check value and gradient of ``apply(tensor, group, my place)`` on these ranks, dense and strided.

    ``inputs`` and what the oracle takes and gives are lists in group order. Strided means that the input is not
    contiguous, and that the gradient arrives at the collective not contiguous either.
    """
    group = world.platform.create_group(ranks)
    if world.rank not in ranks:
        return
    me = sorted(ranks).index(world.rank)
    outputs, weights, gradients = _judge(inputs, oracle)
    for is_strided in (False, True):
        value, gradient = _measure(world, inputs[me], weights[me], lambda x: apply(x, group, me), is_strided=is_strided)
        where = f"rank {world.rank} of {sorted(ranks)}, {'strided' if is_strided else 'dense'}"
        tolerance = world.adapter.tolerance
        np.testing.assert_allclose(value, outputs[me], rtol=tolerance, atol=tolerance, err_msg=f"value, {where}")
        np.testing.assert_allclose(
            gradient, gradients[me], rtol=tolerance, atol=tolerance, err_msg=f"gradient, {where}"
        )


def _judge(inputs: list[np.ndarray], oracle: Oracle) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in inputs]
    outputs = oracle(tensors)
    random = np.random.default_rng(7)
    weights = [random.uniform(0.5, 2.0, tuple(output.shape)) for output in outputs]
    loss = sum((output * torch.from_numpy(weight)).sum() for output, weight in zip(outputs, weights))
    gradients = torch.autograd.grad(loss, tensors)
    return [output.detach().numpy() for output in outputs], weights, [gradient.numpy() for gradient in gradients]


def _measure(
    world: World, array: np.ndarray, weight: np.ndarray, apply: Callable[[Any], Any], *, is_strided: bool
) -> tuple[np.ndarray, np.ndarray]:
    adapter, dtype = world.adapter, world.adapter.gradient_dtype
    seen = []

    def loss(x: Any) -> Any:
        y = apply(reverse_dims(x) if is_strided else x)
        seen.append(adapter.numpy(y))
        if is_strided:
            return (reverse_dims(y) * adapter.tensor(np.ascontiguousarray(weight.T), dtype)).sum()
        return (y * adapter.tensor(weight, dtype)).sum()

    (gradient,) = adapter.gradients(loss, np.ascontiguousarray(array.T if is_strided else array).astype(dtype))
    return seen[-1], gradient.T if is_strided else gradient


def reverse_dims(tensor: Any) -> Any:
    """A view with its dims the other way round: of a contiguous tensor with two dims or more, not contiguous."""
    return tensor.permute(*reversed(range(tensor.ndim)))


def random_inputs(size: int, shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """One array per rank, all different."""
    random = np.random.default_rng(seed)
    return [random.uniform(-2.0, 2.0, shape) for _ in range(size)]
