"""Values that a tape cannot make again: those that backward does not read go, and a region that would hold too many gives up."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .models import WIDTH

ROWS, LARGE = 1024, 512  # values of 2 MiB


@torch.library.custom_op("tape_stuck::unpacked", mutates_args=())
def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """A weight as it is computed with, from a weight as it is stored."""
    return packed.float() * 0.5


class OwnKernel(torch.autograd.Function):
    """Doubles its input in a kernel that the dispatcher does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        doubled = torch.empty_like(x)
        doubled.detach().numpy()[:] = 2 * x.detach().numpy()
        return doubled

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Fused(nn.Module):
    """Two linear layers with such a kernel in between."""

    def __init__(self, width: int = LARGE) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = OwnKernel.apply(self.before(x))
        y: torch.Tensor = self.after(doubled.sin())
        return y


class PackedProduct(torch.autograd.Function):
    """A product with a packed weight, which backward unpacks anew."""

    seen: weakref.ref[torch.UntypedStorage]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed)
        weight = unpacked(packed)
        PackedProduct.seen = weakref.ref(weight.untyped_storage())
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (packed,) = ctx.saved_tensors
        return gradient @ unpacked(packed).T, None


def test_an_unpacked_weight_that_backward_does_not_read_is_not_held() -> None:
    packed = torch.randint(-8, 8, (WIDTH, WIDTH), dtype=torch.int8)

    def region(x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = PackedProduct.apply(x, packed)
        return product.tanh()

    x = torch.randn(4, WIDTH, requires_grad=True)
    (wanted,) = torch.autograd.grad(region(x).sum(), x)
    for _ in range(2):
        output = hp.checkpoint(region, x)
        assert PackedProduct.seen() is None, "the weight as it is computed with is still held"
        (found,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(found, wanted)
    assert dict(hp.stats().regions_from_python) == {}


def run(blocks: list[Any]) -> tuple[torch.Tensor, dict[str, int]]:
    """The gradient of the input, and the regions of this step that ran Python again."""
    before = hp.stats()
    x = torch.linspace(-1, 1, ROWS * LARGE).view(ROWS, LARGE).requires_grad_()
    y = x
    for block in blocks:
        y = block(y)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad, dict(hp.stats().since(before).regions_from_python)


def test_a_region_that_would_hold_much_more_than_a_checkpoint_runs_python_from_its_next_call_on() -> None:
    blocks = [Fused() for _ in range(3)]
    wanted, _ = run(list(blocks))
    wrapped = [hp.checkpoint_wrapper(block) for block in blocks]
    first, reasons = run(wrapped)
    assert torch.equal(first, wanted)
    reason = "ops that are not run again (fused kernels, other libraries) would hold 2.00 MiB of a call"
    assert reasons == {reason: 2}, "the first block had a tape, and those that are built alike had none"
    second, reasons = run(wrapped)
    assert torch.equal(second, wanted)
    assert reasons == {reason: 3}


def test_modules_that_are_built_otherwise_are_tried_by_themselves() -> None:
    run([hp.checkpoint_wrapper(Fused())])
    small = hp.checkpoint_wrapper(Fused(WIDTH))
    before = hp.stats()
    small(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    assert hp.stats().since(before).regions_from_tape == 1


@pytest.mark.parametrize("fate", ["save", "swap"])
def test_what_a_policy_keeps_anyway_does_not_count(fate: str) -> None:
    """An op of another library, whose output a rule saves or swaps: its region stays on the tape."""
    model = nn.Sequential(Unpacks(), Unpacks())
    with simulated_accelerator(), hp.apply_rules(model, {"*::unpacked": fate, "*::*": "recompute"}, blocks="*"):
        for _ in range(2):
            model(torch.randn(4, LARGE, requires_grad=True)).sum().backward()
        assert hp.stats().regions_from_tape == 4
    assert dict(hp.stats().regions_from_python) == {}


class Unpacks(nn.Module):
    """Multiplies with an unpacked weight, and saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.ones(LARGE, 2 * LARGE, dtype=torch.int8))
        self.weight = nn.Parameter(torch.ones(2 * LARGE, LARGE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (x @ unpacked(self.packed)).tanh() @ self.weight
        return result
