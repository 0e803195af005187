"""What only torch has among differentiable collectives: second derivatives, half precision, and the leaf's own memory."""

# ruff: noqa: B023 - every function made in a loop here is called before the loop goes on.

from __future__ import annotations

import numpy as np
import pytest
import torch

from .marks import on_ranks
from .worker import World


def second_derivative(function, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the squared gradient's sum: it needs the backward of the backward."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad((first**2).sum(), x)[0]


@on_ranks(2)
def test_second_derivatives_are_those_of_one_process(world: World):
    if world.adapter.name != "torch":
        return
    platform = world.platform
    inputs = [torch.tensor(np.random.default_rng(rank).normal(size=(4, 2))) for rank in range(2)]
    cases = {
        "all_reduce sum": (lambda x: platform.differentiable_all_reduce(x, "sum", None), lambda xs: [xs.sum(0)] * 2),
        "all_reduce max": (lambda x: platform.differentiable_all_reduce(x, "max", None), lambda xs: [xs.amax(0)] * 2),
        "all_reduce prod": (lambda x: platform.differentiable_all_reduce(x, "prod", None), lambda xs: [xs.prod(0)] * 2),
        "gather": (
            lambda x: platform.differentiable_all_gather_concat(x, None, 2, 1),
            lambda xs: [torch.cat(list(xs), 1)] * 2,
        ),
        "exchange": (
            lambda x: platform.differentiable_all_to_all_single(x, [1, 3], [[1, 1], [3, 3]][world.rank], None),
            lambda xs: [torch.cat([xs[0][:1], xs[1][:1]]), torch.cat([xs[0][1:], xs[1][1:]])],
        ),
    }
    for name, (distributed, single) in cases.items():
        found = second_derivative(lambda x: (distributed(x) ** 3).sum(), inputs[world.rank])

        def in_one(stacked):
            return sum((y**3).sum() for y in single(stacked))

        expected = second_derivative(in_one, torch.stack(inputs))[world.rank]
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-10, err_msg=name)


@on_ranks(2)
def test_all_has_no_gradient_and_half_precision_keeps_its_dtype(world: World):
    if world.adapter.name != "torch":
        return
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    assert not world.platform.differentiable_all_reduce(x, "all", None).requires_grad
    for op in ("sum", "avg", "max", "min", "prod"):
        y = world.platform.differentiable_all_reduce(x, op, None)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert (y.dtype, gradient.dtype) == (torch.bfloat16, torch.bfloat16)


@on_ranks(2)
def test_plain_collectives_write_into_leaves_and_refuse_expanded_tensors(world: World):
    if world.adapter.name != "torch":
        return
    leaf = torch.ones(2, 3).t().requires_grad_()
    assert not leaf.is_contiguous()
    world.platform.all_reduce(leaf, None)
    assert leaf.tolist() == [[2.0, 2.0]] * 3
    expanded = torch.ones(1, 3).expand(2, 3)
    with pytest.raises(ValueError, match=r"cannot write into an expanded tensor of shape \(2, 3\)"):
        world.platform.all_reduce(expanded, None)
