"""Autograd modes, profiler ranges and activation memory on torch."""

from __future__ import annotations

import copy

import pytest
import torch

from hyper_parallel.core.activation_checkpoint import CheckpointPolicy
from hyper_parallel.platform.torch.platform import TorchPlatform

from .marks import covers

platform = TorchPlatform()


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def step(model: torch.nn.Module, run=None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and every gradient, the input's first, of one step."""
    torch.manual_seed(1)
    data = torch.randn(4, 8, requires_grad=True)
    output = model(data) if run is None else run(model, data)
    output.square().sum().backward()
    return output.detach(), [data.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same_step(wrapped, plain):
    assert torch.equal(wrapped[0], plain[0])
    assert len(wrapped[1]) == len(plain[1])
    for ours, theirs in zip(wrapped[1], plain[1]):
        assert torch.equal(ours, theirs)


@covers("no_grad")
def test_no_grad_records_nothing():
    weight = torch.ones(2, requires_grad=True)
    with platform.no_grad():
        assert not (weight * 2).requires_grad
    assert (weight * 2).requires_grad


@covers("profiler_record")
def test_ranges_show_in_the_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with platform.profiler_record("hyper_parallel: a named range"):
            torch.ones(4).sum()
    names = {event.key for event in profile.key_averages()}
    assert "hyper_parallel: a named range" in names
    assert "aten::sum" in names


@covers("checkpoint")
def test_checkpoint_recomputes_and_gives_the_same_gradients(model):
    plain = step(copy.deepcopy(model))
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    assert_same_step(step(model, lambda m, x: platform.checkpoint(m, x)), plain)
    assert calls == ["forward", "forward"]
    assert TorchPlatform.checkpoint is platform.checkpoint


@covers("checkpoint")
def test_checkpoint_is_never_reentrant(model):
    with pytest.raises(ValueError, match=r"checkpoint: use_reentrant=True is not .*leave it out"):
        platform.checkpoint(model, torch.ones(1, 8), use_reentrant=True)
    platform.checkpoint(model, torch.ones(1, 8), use_reentrant=False).sum().backward()
    assert model[0].weight.grad is not None


@covers("checkpoint", "noop_context_fn")
def test_checkpoint_takes_contexts(model):
    plain = step(copy.deepcopy(model))
    run = lambda m, x: platform.checkpoint(m, x, context_fn=platform.noop_context_fn)  # noqa: E731
    assert_same_step(step(model, run), plain)


@covers("ckpt_wrapper")
def test_a_checkpointed_module_steps_like_the_plain_one(model):
    plain = step(copy.deepcopy(model))
    names = list(model.state_dict())
    wrapped = platform.ckpt_wrapper(model)
    assert_same_step(step(wrapped), plain)
    assert list(wrapped.state_dict()) == names


@covers("ckpt_wrapper")
def test_the_wrapper_calls_the_function_it_was_given(model):
    seen = []

    def checkpoint_fn(function, *args, flag=None, **kwargs):
        seen.append(flag)
        return platform.checkpoint(function, *args, **kwargs)

    plain = step(copy.deepcopy(model))
    assert_same_step(step(platform.ckpt_wrapper(model, checkpoint_fn, flag="mine")), plain)
    assert seen == ["mine"]


@covers("swap_wrapper")
def test_a_swapped_module_steps_like_the_plain_one(model):
    plain = step(copy.deepcopy(model))
    wrapped = platform.swap_wrapper(model)
    assert_same_step(step(wrapped), plain)
    model.zero_grad()
    assert_same_step(step(platform.swap_wrapper(model, lambda tensor: CheckpointPolicy.MUST_SAVE)), plain)


@covers("async_save_on_cpu")
def test_saved_tensors_go_and_come_back(model):
    plain = step(copy.deepcopy(model))

    def run(module, data):
        with platform.async_save_on_cpu():
            return module(data)

    assert_same_step(step(model, run), plain)


@covers("create_selective_checkpoint_contexts")
@pytest.mark.parametrize(
    "policy",
    [["addmm"], [torch.ops.aten.addmm.default], lambda ctx, op, *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE],
    ids=["names", "ops", "function"],
)
def test_selective_checkpoints_step_like_the_plain_model(model, policy):
    plain = step(copy.deepcopy(model))

    def run(module, data):
        return platform.checkpoint(
            module, data, context_fn=lambda: platform.create_selective_checkpoint_contexts(policy)
        )

    assert_same_step(step(model, run), plain)
