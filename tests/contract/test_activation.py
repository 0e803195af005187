"""Activation memory through the Platform, on every framework: the same step, saved, recomputed or swapped."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from hyper_parallel.core.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.call_keywords import CHECKPOINT_SETTINGS

from .marks import covers
from .models import models_for

BATCH = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
PRODUCTS = {"torch": "addmm", "mindspore": "Dense"}  # what a linear layer is called below the framework


@pytest.fixture
def model(adapter):
    return models_for(adapter).small()


def activation_room(adapter):
    """The framework's own activation package."""
    return importlib.import_module(f"hyper_parallel.platform.{adapter.name}.activation_checkpoint")


def gradients(adapter, run):
    return adapter.gradients(lambda x: (run(x) * run(x)).sum(), BATCH)


def test_every_policy_has_one_number():
    assert [(policy.name, policy.value) for policy in CheckpointPolicy] == [
        ("MUST_SAVE", 0),
        ("PREFER_SAVE", 1),
        ("MUST_RECOMPUTE", 2),
        ("PREFER_RECOMPUTE", 3),
        ("MUST_SWAP", 4),
    ]


@covers("checkpoint", "noop_context_fn")
def test_a_checkpoint_gives_the_same_gradients(platform, adapter, model):
    plain = gradients(adapter, model)
    np.testing.assert_array_equal(gradients(adapter, lambda x: platform.checkpoint(model, x)), plain)
    run = lambda x: platform.checkpoint(model, x, context_fn=platform.noop_context_fn)  # noqa: E731
    np.testing.assert_array_equal(gradients(adapter, run), plain)
    with pytest.raises(ValueError, match=r"checkpoint: use_reentrant=True is not .*leave it out"):
        platform.checkpoint(model, adapter.tensor(BATCH), use_reentrant=True)


@covers("ckpt_wrapper", "swap_wrapper")
def test_wrapped_modules_step_like_the_plain_one_under_the_same_names(platform, adapter, model):
    plain, names = gradients(adapter, model), list(model.state_dict())
    for wrap in (platform.ckpt_wrapper, platform.swap_wrapper):
        wrapped = wrap(model)
        np.testing.assert_array_equal(gradients(adapter, wrapped), plain)
        assert list(wrapped.state_dict()) == names
        assert list(platform.parameters_dict(wrapped)) == list(platform.parameters_dict(model))
    keeping = platform.swap_wrapper(model, lambda tensor: CheckpointPolicy.MUST_SAVE)
    np.testing.assert_array_equal(gradients(adapter, keeping), plain)


@covers("ckpt_wrapper")
def test_a_wrapper_calls_the_function_it_was_given(platform, adapter, model):
    seen = []

    def checkpoint_fn(function, *args, flag=None, **kwargs):
        seen.append(flag)
        return platform.checkpoint(function, *args, **kwargs)

    wrapped = platform.ckpt_wrapper(model, checkpoint_fn, flag="mine")
    np.testing.assert_array_equal(gradients(adapter, wrapped), gradients(adapter, model))
    assert seen == ["mine", "mine"]


@pytest.mark.parametrize("name", [*sorted(CHECKPOINT_SETTINGS), "args", "kwargs", "module", "checkpoint_fn", "flag"])
@covers("ckpt_wrapper", "swap_wrapper")
def test_every_keyword_of_a_wrappers_call_is_the_modules(platform, adapter, name):
    """Also one that the function below would read as its own setting (``flag``: one that a user's function takes)."""

    def module(x, **keywords):
        assert list(keywords) == [name]
        return x * x * keywords[name]

    def checkpoint_fn(function, *args, flag, **kwargs):
        assert flag == "the function's"
        return platform.checkpoint(function, *args, **kwargs)

    room = activation_room(adapter)
    wrappers = {
        "ours": room.checkpoint_wrapper(module),
        "inputs": room.checkpoint_wrapper(module, swap_inputs=True),
        "policy": room.checkpoint_wrapper(
            module, policy_fn=["mm" if adapter.name == "torch" else "MatMul"], use_reentrant=False
        ),
        "both": room.checkpoint_wrapper(room.swap_wrapper(module)),
        "framework's": platform.ckpt_wrapper(module),
        "user's": platform.ckpt_wrapper(module, checkpoint_fn, flag="the function's"),
        "swap": platform.swap_wrapper(module),
    }
    plain = adapter.value_and_gradients(lambda x, factor: module(x, **{name: factor}).sum(), BATCH, BATCH + 2)
    for kind, wrapped in wrappers.items():
        found = adapter.value_and_gradients(
            lambda x, factor, wrapped=wrapped: wrapped(x, **{name: factor}).sum(), BATCH, BATCH + 2
        )
        np.testing.assert_array_equal(found[0], plain[0], err_msg=kind)
        np.testing.assert_array_equal(found[1], plain[1], err_msg=kind)


@covers("ckpt_wrapper")
def test_a_call_overrides_a_keyword_that_the_wrapper_was_made_with(adapter):
    wrapped = activation_room(adapter).checkpoint_wrapper(lambda x, scale: x * scale, scale=2.0)
    x = adapter.tensor(BATCH)
    np.testing.assert_array_equal(adapter.numpy(wrapped(x)), BATCH * 2)
    np.testing.assert_array_equal(adapter.numpy(wrapped(x, scale=3.0)), BATCH * 3)


@covers("async_save_on_cpu")
def test_what_is_saved_in_the_context_goes_and_comes_back(platform, adapter, model):
    def run(x):
        with platform.async_save_on_cpu():
            return model(x)

    np.testing.assert_array_equal(gradients(adapter, run), gradients(adapter, model))


@covers("create_selective_checkpoint_contexts")
@pytest.mark.parametrize("kind", ["names", *(policy.name for policy in CheckpointPolicy)])
def test_regions_obey_policies_and_give_the_same_gradients(platform, adapter, model, kind):
    product, asked = PRODUCTS[adapter.name], []

    def policy(ctx, op, *args, **kwargs):
        asked.append(platform.get_op_name(op))
        return CheckpointPolicy[kind]

    given = [product] if kind == "names" else policy
    contexts = lambda: platform.create_selective_checkpoint_contexts(given)  # noqa: E731
    found = gradients(adapter, lambda x: platform.checkpoint(model, x, context_fn=contexts))
    np.testing.assert_array_equal(found, gradients(adapter, model))
    assert kind == "names" or product in asked


@covers("create_selective_checkpoint_contexts")
def test_what_is_no_policy_is_refused(platform):
    for given in ("mm", None, 3):
        with pytest.raises(TypeError, match=r"checkpoint: a policy is a function .* or a list of ops or op names, got"):
            platform.create_selective_checkpoint_contexts(given)
