"""Modules and parameters: finding, replacing, filling, clipping, splitting a batch."""

from __future__ import annotations

import numpy as np
import pytest

from .marks import covers
from .models import models_for

BATCH = np.linspace(-1.0, 1.0, 12).reshape(3, 4)


@pytest.fixture
def models(adapter):
    return models_for(adapter)


@covers("get_cell_construct", "get_cells_and_names", "parameters_dict")
def test_a_model_and_its_names(platform, adapter, models):
    model = models.small()
    cells = platform.get_cells_and_names(model)
    assert cells[0] == ("", model)
    assert [name for name, _ in cells] == ["", "embed", "first", "second"]
    assert dict(cells)["second"] is model.second
    parameters = platform.parameters_dict(model)
    assert tuple(parameters) == models.names
    assert parameters["first.bias"] is model.first.bias
    output = platform.get_cell_construct(model)(adapter.tensor(BATCH, "float32"))
    np.testing.assert_allclose(adapter.numpy(output), models.run(model, BATCH), rtol=1e-6)


@covers("is_linear_module", "is_embedding_module")
def test_kinds_of_modules(platform, models):
    model = models.small()
    assert platform.is_linear_module(model.first)
    assert not platform.is_linear_module(model.embed)
    assert platform.is_embedding_module(model.embed)
    assert not platform.is_embedding_module(model)


@covers("search_parameter_by_name")
def test_parameters_are_found_by_their_dotted_name(platform, models):
    model = models.small()
    assert platform.search_parameter_by_name(model, "first.weight") is model.first.weight
    assert platform.search_parameter_by_name(model, "self.first.weight") is model.first.weight
    for unknown in ("first.gain", "myself.first.weight", "first", "scale", ""):
        assert platform.search_parameter_by_name(model, unknown) is None
    tied = models.tied()
    assert platform.search_parameter_by_name(tied, "second.weight") is tied.first.weight


@covers("search_parameter_by_name", "update_parameter_by_name")
def test_a_name_that_only_ends_in_self_is_not_damaged(platform, models):
    model = models.small()
    model.myself = model.first
    assert platform.search_parameter_by_name(model, "myself.weight") is model.first.weight
    assert platform.search_parameter_by_name(model, "self.myself.weight") is model.first.weight


@covers("update_parameter_by_name")
def test_a_parameter_is_replaced_where_it_is_used(platform, adapter, models):
    model = models.small()
    new = platform.new_zero_parameter((4, 4), platform.str_to_dtype("float32"), True, "cpu")
    assert platform.update_parameter_by_name(model, ("self.second.weight", model.second.weight), new) is True
    assert model.second.weight is new
    assert platform.parameters_dict(model)["second.weight"] is new
    expected = np.tile(adapter.numpy(model.second.bias), (3, 1))
    np.testing.assert_allclose(models.run(model, BATCH), expected, rtol=1e-6)
    assert platform.update_parameter_by_name(model, ("second.gain", None), new) is False
    with pytest.raises(TypeError, match=r"update_parameter_by_name: a \w+ holds .*Parameter, not .*Tensor"):
        platform.update_parameter_by_name(model, ("first.weight", model.first.weight), adapter.tensor(np.ones((4, 4))))


@covers("update_parameter_by_name")
def test_tied_parameters_stay_tied(platform, models):
    model = models.tied()
    new = platform.new_zero_parameter((4, 4), platform.str_to_dtype("float32"), True, "cpu")
    assert platform.update_parameter_by_name(model, ("second.weight", model.second.weight), new)
    assert model.first.weight is new
    assert model.second.weight is new


@covers("new_zero_parameter", "get_param_type_size", "get_param_local_shape", "get_param_local_data")
def test_a_new_parameter_is_zeros(platform, adapter):
    parameter = platform.new_zero_parameter((2, 3), platform.str_to_dtype("bfloat16"), False, "cpu")
    assert isinstance(parameter, platform.Parameter)
    assert not parameter.requires_grad
    assert platform.get_param_type_size(parameter) == 2
    assert tuple(platform.get_param_local_shape(parameter)) == (2, 3)
    assert adapter.numpy(platform.get_param_local_data(parameter)).tolist() == [[0.0] * 3] * 2
    assert platform.new_zero_parameter((1,), platform.str_to_dtype("float32"), True, "cpu").requires_grad


@covers("update_param_data", "load_into_param")
def test_data_moves_into_parameters(platform, adapter, models):
    model = models.small()
    weight = model.first.weight
    platform.update_param_data(weight, adapter.tensor(np.full((4, 4), 2.0), "float32"))
    assert model.first.weight is weight
    assert adapter.numpy(weight).tolist() == [[2.0] * 4] * 4
    platform.load_into_param(weight, adapter.tensor(np.full((4, 4), 3.0), "float64"))
    assert (adapter.numpy(weight).tolist(), weight.dtype) == ([[3.0] * 4] * 4, platform.str_to_dtype("float32"))
    with pytest.raises(ValueError, match=r"load_into_param: the parameter has shape \(4, 4\) and the data \(4,\)"):
        platform.load_into_param(weight, adapter.tensor(np.ones(4)))


@covers("init_parameters")
@pytest.mark.parametrize("stage", [None, -1, "0", True])
def test_a_stage_is_a_number(platform, models, stage):
    with pytest.raises(ValueError, match=r"init_parameters: stage_index must be a pipeline stage, 0 or greater; got"):
        platform.init_parameters(models.small(), stage)


@covers("init_parameters")
def test_a_stage_has_a_module(platform):
    with pytest.raises(ValueError, match=r"init_parameters: module must be the module of a pipeline stage; got None"):
        platform.init_parameters(None, 0)
    with pytest.raises(ValueError, match=r"init_parameters: module must be"):
        platform.init_parameters(module=None, stage_index=0)


@covers("init_on_device", "init_parameters", "meta_device", "load_into_param")
def test_models_are_born_without_bytes_and_filled_later(platform, adapter, models):
    with platform.init_on_device(platform.meta_device):
        model = models.small()
    assert all("meta" in str(p.device).lower() for p in platform.parameters_dict(model).values())
    assert "meta" not in str(model.scale.device).lower()
    weight = model.first.weight
    platform.load_into_param(weight, adapter.tensor(np.full((4, 4), 5.0), "float32"))
    assert model.first.weight is weight
    platform.init_parameters(model, 0)
    assert adapter.numpy(model.first.weight).tolist() == [[5.0] * 4] * 4
    assert np.isfinite(models.run(model, BATCH)).all()
    assert adapter.numpy(model.second.weight).std() > 0


@covers("get_model_state_dict")
def test_state_dict_options(platform, adapter, models):
    model = models.small()
    state = platform.get_model_state_dict(model)
    assert set(state) == {*models.names, *models.buffers}
    model.first.weight.requires_grad = False
    for options in ({"ignore_frozen_params": True}, StateOptions(ignore_frozen_params=True)):
        assert set(platform.get_model_state_dict(model, options=options)) == set(state) - {"first.weight"}
    full = platform.get_model_state_dict(model, options={"full_state_dict": True, "cpu_offload": True})
    np.testing.assert_array_equal(adapter.numpy(full["first.weight"]), adapter.numpy(model.first.weight))
    with pytest.raises(ValueError, match=r"unknown options \['full'\]; known are \['full_state_dict', 'cpu_offload'"):
        platform.get_model_state_dict(model, options={"full": True})
    with pytest.raises(TypeError, match=r"options of type int have none of"):
        platform.get_model_state_dict(model, options=3)


class StateOptions:
    """A foreign options object with one attribute of ours and some of its own."""

    def __init__(self, ignore_frozen_params):
        self.ignore_frozen_params = ignore_frozen_params
        self.strict = True


@covers("clip_grad_norm_")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf"), 0.0])
@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_scales_by_the_true_norm(platform, adapter, models, norm_type, foreach):
    model = models.small()
    models.backward(model, BATCH)
    before = [adapter.numpy(p.grad) for p in platform.parameters_dict(model).values()]
    flat = np.concatenate([g.ravel() for g in before]).astype(np.float64)
    expected = np.linalg.norm(flat, norm_type)
    total = platform.clip_grad_norm_(model, expected / 4, norm_type, foreach=foreach)
    np.testing.assert_allclose(float(adapter.numpy(total)), expected, rtol=1e-6)
    for grad, parameter in zip(before, platform.parameters_dict(model).values()):
        np.testing.assert_allclose(adapter.numpy(parameter.grad), grad / 4, rtol=1e-5)


@covers("clip_grad_norm_")
def test_clipping_takes_a_tensor_or_an_iterable_and_leaves_small_gradients(platform, adapter, models):
    model = models.small()
    models.backward(model, BATCH)
    weight = model.first.weight
    before = adapter.numpy(weight.grad)
    total = platform.clip_grad_norm_(weight, 1e9)
    np.testing.assert_allclose(float(adapter.numpy(total)), np.linalg.norm(before), rtol=1e-6)
    np.testing.assert_array_equal(adapter.numpy(weight.grad), before)
    twice = platform.clip_grad_norm_(iter([weight, weight]), 1e9)
    np.testing.assert_allclose(float(adapter.numpy(twice)), np.linalg.norm(before), rtol=1e-6)
    with pytest.raises(TypeError, match=r"clip_grad_norm_: expected a module, a tensor or an iterable .* got int"):
        platform.clip_grad_norm_(3, 1.0)
    with pytest.raises(TypeError, match=r"clip_grad_norm_: the iterable holds a str, not a tensor"):
        platform.clip_grad_norm_(["weight"], 1.0)
    with pytest.raises(ValueError, match=r"clip_grad_norm_: max_norm must be 0 or greater, got -1"):
        platform.clip_grad_norm_(weight, -1)


@covers("clip_grad_norm_")
def test_a_norm_that_is_not_finite_changes_nothing(platform, adapter, models):
    model = models.small()
    models.backward(model, BATCH)
    model.first.bias.grad = adapter.tensor(np.full(4, np.nan), "float32")
    before = adapter.numpy(model.first.weight.grad)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: cannot clip, the norm of order 2 .* is nan; no gradient"):
        platform.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    np.testing.assert_array_equal(adapter.numpy(model.first.weight.grad), before)


@covers("register_forward_pre_hook")
def test_forward_pre_hooks(platform, models):
    model = models.small()
    calls = []
    last = platform.register_forward_pre_hook(model, lambda m, args: calls.append("last"))
    first = platform.register_forward_pre_hook(model, lambda m, args: calls.append("first"), prepend=True)
    named = platform.register_forward_pre_hook(
        model, lambda m, args, kwargs: calls.append(sorted(kwargs)), with_kwargs=True
    )
    models.run(model, BATCH)
    assert calls == ["first", "last", []]
    for handle in (last, first, named):
        handle.remove()
    models.run(model, BATCH)
    assert len(calls) == 3


@covers("register_full_backward_hook", "register_full_backward_pre_hook")
def test_backward_hooks(platform, adapter, models):
    model = models.small()
    calls = []
    handles = [
        platform.register_full_backward_hook(model.first, lambda m, gi, go: calls.append("after, last")),
        platform.register_full_backward_hook(model.first, lambda m, gi, go: calls.append("after, first"), prepend=True),
        platform.register_full_backward_pre_hook(model.first, lambda m, go: calls.append("before, last")),
        platform.register_full_backward_pre_hook(
            model.first, lambda m, go: calls.append("before, first"), prepend=True
        ),
    ]
    models.backward(model, BATCH)
    assert calls == ["before, first", "before, last", "after, first", "after, last"]
    for handle in handles:
        handle.remove()
    models.backward(model, BATCH)
    assert len(calls) == 4
