"""Activation memory through the Platform, on every framework: the same step, saved, recomputed or swapped."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.activation_checkpoint import CheckpointPolicy

from .marks import covers
from .models import models_for

BATCH = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
PRODUCTS = {"torch": "addmm", "mindspore": "Dense"}  # what a linear layer is called below the framework


@pytest.fixture
def model(adapter):
    return models_for(adapter).small()


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
    with pytest.raises(TypeError, match=r"the call gives flag, which the wrapper was made with already"):
        wrapped(adapter.tensor(BATCH), flag="again")


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
