"""Sparse, nested and other unusual values in regions: kept, replayed, counted, never in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import create_selective_checkpoint_contexts
from hyper_parallel.backends.torch.ops import facts_of
from hyper_parallel.core.activation_checkpoint.swap import SwapTensor
from hyper_parallel.errors import PolicyError
from hyper_parallel.testing import simulated_accelerator

from .scenario import batch


def _sparse(x: torch.Tensor) -> torch.Tensor:
    return ((x * 2).to_sparse() * 3).to_dense().sin()


def _nested(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1].exp(), x[1:].exp()], layout=torch.jagged)
    return (rows * 2).sin().values().cos()


@pytest.mark.parametrize(
    ("function", "saved"),
    # Torch's own checkpoint refuses to recompute all of a nested chain: the ragged size is another symbol.
    [(_sparse, ""), (_sparse, "mul"), (_sparse, "nothing"), (_nested, ""), (_nested, "mul")],
)
def test_b8_a_region_with_exotic_tensors(function: Any, saved: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saved in str(op) else CheckpointPolicy.MUST_RECOMPUTE

    x = batch()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    with simulated_accelerator():
        (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=policy).sum(), x)
    assert torch.equal(got, wanted)


_needs_higher_order_ops_in_modes = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch (2.8) lets no dispatch mode see a higher-order op: it raises NotImplementedError and names the op",
)

ANSWERS = [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE]


def _asks_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    h = x.sin()
    with torch.inference_mode():
        scale = float((h.detach() * 2).abs().max())
    return (h * scale).exp()


def _writes_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros_like(x) + 1
    with torch.inference_mode():
        table.mul_(3)
    return (x * table).exp()


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda v: v.sin() * 2, lambda v: v.cos() * 3, (x,)).exp()


class _Image(torch.Tensor):
    """A tensor with a name of its own, as data pipelines have them."""


def _changes_a_subclass(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).as_subclass(_Image)
    y.add_(1)
    return y.as_subclass(torch.Tensor).exp()


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
@pytest.mark.parametrize(
    "function",
    [
        _asks_in_inference_mode,
        _writes_in_inference_mode,
        pytest.param(_branches, marks=_needs_higher_order_ops_in_modes),
        _changes_a_subclass,
    ],
    ids=["asks_in_inference_mode", "writes_in_inference_mode", "higher_order_op", "change_through_a_subclass"],
)
def test_a_region_with_unusual_ops(function: Any, answer: CheckpointPolicy) -> None:
    x = batch()
    (wanted,) = torch.autograd.grad(function(x).sum(), x)
    with simulated_accelerator():
        (got,) = torch.autograd.grad(hp.checkpoint(function, x, policy_fn=lambda *_, **__: answer).sum(), x)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("op", "reason"),
    [(torch.ops.aten.unsafe_split.Tensor, "view"), (triton_kernel_wrapper_mutation, "in_place")],
    ids=["unsafe_split", "user_kernel"],
)
def test_what_is_replayed_although_its_schema_does_not_say_why(op: Any, reason: str) -> None:
    assert facts_of(op).replay_reason == reason


@_needs_higher_order_ops_in_modes
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_in_a_region_and_in_a_list_of_ops() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    weight, q = torch.randn(16, 16, requires_grad=True), torch.randn(1, 2, 16, 16)

    def function(weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # its CPU kernel has no backward
            attended = flex.flex_attention(q, q, q)
        return (attended @ weight).sin()

    (wanted,) = torch.autograd.grad(function(weight).sum(), weight)
    for policy in (["mm"], [torch.ops.higher_order.flex_attention, torch.ops.aten.mm.default]):
        with simulated_accelerator():
            (got,) = torch.autograd.grad(hp.checkpoint(function, weight, policy_fn=policy).sum(), weight)
        assert torch.equal(got, wanted)


def test_one_pair_of_contexts_serves_one_call() -> None:
    pair = create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    x = batch()
    y = hp.checkpoint(torch.sin, x, context_fn=lambda: pair)
    with pytest.raises(PolicyError, match="a function that makes a new pair for every call"):
        hp.checkpoint(torch.sin, y, context_fn=lambda: pair)


def test_an_answer_without_a_hash_is_named() -> None:
    with simulated_accelerator(), pytest.raises(PolicyError, match=r"the tensor policy answered \[1\]"):
        hp.swap(lambda x: x.sin(), batch(), policy_fn=lambda _: [1])


def _tangent(x: torch.Tensor) -> torch.Tensor:
    weight = x.detach().cos()

    def function(a: torch.Tensor) -> torch.Tensor:
        return (a * weight).sin() * (x * weight) * a

    return torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def _zero_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * torch._efficientzerotensor(x.shape) + x * x


def _nested_by_strides(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([x[:1].exp(), x[1:].exp()])
    return torch.cat([row.flatten() for row in (rows * rows).unbind()])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "function", [_tangent, _zero_tensor, _nested_by_strides], ids=["jvp", "zero_tensor", "nested_by_strides"]
)
def test_a_tensor_that_reports_bytes_and_is_not_copied_by_them_stays(function: Any) -> None:
    x = batch()
    with simulated_accelerator(window_bytes=0):
        (wanted,) = torch.autograd.grad(function(x).sum(), x)
        y = hp.swap(function, x)
        assert hp.stats().kept_bytes["no_plain_storage"] > 0
        (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("function", [_tangent, _zero_tensor], ids=["jvp", "zero_tensor"])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.name)
def test_a_region_with_tensors_that_have_no_data(function: Any, answer: CheckpointPolicy) -> None:
    x = batch()
    with simulated_accelerator(window_bytes=0):
        (wanted,) = torch.autograd.grad(function(x).sum(), x)
        y = hp.checkpoint(function, x, policy_fn=lambda *_, **__: answer)
        (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)


def test_a_tensor_with_more_than_bytes_is_none_that_a_swap_tensor_moves() -> None:
    with simulated_accelerator():
        for tensor in (torch._efficientzerotensor((4, 4)), torch.randn(4, 4, dtype=torch.complex64).conj()):
            held = SwapTensor(tensor, "forward")
            assert held.state == "non_tensor"
            assert held.get_val() is tensor
