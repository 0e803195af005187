"""Parameters with a layout, on both frameworks alike: what is attached, written, read, saved and clipped agrees."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

from .marks import covers, on_ranks
from .models import models_for
from .worker import World

WHOLE = np.arange(16, dtype=np.float32).reshape(4, 4)


def rows_layout(world: World):
    """The layout of a matrix whose rows are cut over all ranks."""
    if world.adapter.name == "torch":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard

        return init_device_mesh("cpu", (world.size,)), [Shard(0)]
    import mindspore

    return mindspore.parallel.Layout((world.size,), ("tp",))("tp", "None")


def part(world: World, array: np.ndarray) -> np.ndarray:
    return np.split(array, world.size)[world.rank]


def sharded_model(world: World):
    """A model whose first weight has a layout, and the object that the weight was before."""
    model = models_for(world.adapter).small()
    old = model.first.weight
    world.platform.load_into_param(old, world.adapter.tensor(WHOLE))
    returned = world.platform.set_layout_into_parameter(old, rows_layout(world))
    assert model.first.weight is returned
    return model, old


@covers("set_layout_into_parameter", "get_param_local_shape", "get_param_local_data")
@on_ranks(2)
def test_a_layout_is_attached_where_the_parameter_is_held(world: World):
    model, old = sharded_model(world)
    for parameter in (model.first.weight, old, world.platform.parameters_dict(model)["first.weight"]):
        assert tuple(world.platform.get_param_local_shape(parameter)) == (2, 4)
        found = world.adapter.numpy(world.platform.get_param_local_data(parameter))
        np.testing.assert_array_equal(found, part(world, WHOLE))
        with pytest.raises(ValueError, match=r"shape \(4, 4\) already has .*a second layout is refused"):
            world.platform.set_layout_into_parameter(parameter, rows_layout(world))


@covers("set_layout_into_parameter")
@on_ranks(2)
def test_tied_weights_get_one_layout(world: World):
    model = models_for(world.adapter).tied()
    world.platform.set_layout_into_parameter(model.first.weight, rows_layout(world))
    assert model.second.weight is model.first.weight
    assert tuple(world.platform.get_param_local_shape(model.second.weight)) == (2, 4)


@covers("update_param_data", "load_into_param", "get_param_local_data", "get_param_local_shape")
@on_ranks(2)
def test_a_shard_written_is_a_shard_read(world: World):
    platform, adapter = world.platform, world.adapter
    for through_old in (False, True):
        model, old = sharded_model(world)
        target = old if through_old else model.first.weight
        for step, (write, data) in enumerate(
            [
                (platform.update_param_data, part(world, WHOLE)),
                (platform.load_into_param, part(world, WHOLE)),
                (platform.load_into_param, WHOLE),
            ]
        ):
            write(target, adapter.tensor(data + 100 * step + 1))
            for parameter in (model.first.weight, old):
                assert tuple(platform.get_param_local_shape(parameter)) == (2, 4)
                found = adapter.numpy(platform.get_param_local_data(parameter))
                np.testing.assert_array_equal(found, part(world, WHOLE) + 100 * step + 1)
        with pytest.raises(ValueError, match=r"this rank holds \(2, 4\) .* was given \(4, 4\); give the local part"):
            platform.update_param_data(target, adapter.tensor(WHOLE))
        with pytest.raises(ValueError, match=r"shape \(4, 4\), this rank's part \(2, 4\); the data has \(3,\)"):
            platform.load_into_param(target, adapter.tensor(np.ones(3, np.float32)))


@covers("set_layout_into_parameter", "load_into_param", "init_parameters")
@on_ranks(2)
def test_a_parameter_without_bytes_takes_a_layout_and_is_filled_later(world: World):
    platform, adapter = world.platform, world.adapter
    with platform.init_on_device(platform.meta_device):
        model = models_for(adapter).small()
    for layer in (model.first, model.second):
        platform.set_layout_into_parameter(layer.weight, rows_layout(world))
        assert tuple(platform.get_param_local_shape(layer.weight)) == (2, 4)
    platform.load_into_param(model.first.weight, adapter.tensor(WHOLE))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
        platform.init_parameters(model, 0)
    found = adapter.numpy(platform.get_param_local_data(model.first.weight))
    np.testing.assert_array_equal(found, part(world, WHOLE))
    filled = adapter.numpy(platform.get_param_local_data(model.second.weight))
    assert (filled.shape, bool(np.isfinite(filled).all())) == ((2, 4), True)


@covers("set_layout_into_parameter", "get_model_state_dict")
@on_ranks(2)
def test_a_copy_of_a_model_keeps_its_layout(world: World):
    model, _ = sharded_model(world)
    copied = copy.deepcopy(model)
    world.platform.load_into_param(copied.first.weight, world.adapter.tensor(WHOLE + 1))
    for original, values in ((copied, WHOLE + 1), (model, WHOLE)):
        state = world.platform.get_model_state_dict(original, options={"full_state_dict": True})
        np.testing.assert_array_equal(world.adapter.numpy(state["first.weight"]), values)


@covers("get_model_state_dict", "save_checkpoint", "load_checkpoint")
@on_ranks(2)
def test_a_model_with_a_layout_is_saved_whole(world: World):
    platform, adapter = world.platform, world.adapter
    model, _ = sharded_model(world)
    state = platform.get_model_state_dict(model, options={"full_state_dict": True})
    np.testing.assert_array_equal(adapter.numpy(state["first.weight"]), WHOLE)
    offloaded = platform.get_model_state_dict(model, options={"full_state_dict": True, "cpu_offload": True})
    assert bool(offloaded) == (world.rank == 0)
    path = world.fresh_path(f"layout-{adapter.name}")
    platform.save_checkpoint(model, path)
    platform.barrier()
    np.testing.assert_array_equal(adapter.numpy(platform.load_checkpoint(path)["first.weight"]), WHOLE)


@covers("clip_grad_norm_")
@on_ranks(2)
def test_gradients_of_parts_have_the_norm_of_the_whole(world: World):
    platform, adapter = world.platform, world.adapter
    for norm_type in (1.0, 2.0, float("inf")):
        weight = platform.new_zero_parameter((4, 4), platform.str_to_dtype("float32"), True, "cpu")
        plain = platform.new_zero_parameter((4, 4), platform.str_to_dtype("float32"), True, "cpu")
        weight.grad = adapter.tensor(WHOLE)
        plain.grad = adapter.tensor(WHOLE + 1)
        weight = platform.set_layout_into_parameter(weight, rows_layout(world))
        expected = float(np.linalg.norm(np.concatenate([WHOLE.ravel(), WHOLE.ravel() + 1]), norm_type))
        total = platform.clip_grad_norm_([weight, plain], expected / 2, norm_type)
        assert float(total) == pytest.approx(expected, rel=1e-6)
        grad = weight.grad.to_local() if adapter.name == "torch" else weight.grad
        np.testing.assert_allclose(adapter.numpy(grad), part(world, WHOLE) / 2, rtol=1e-5)
        np.testing.assert_allclose(adapter.numpy(plain.grad), (WHOLE + 1) / 2, rtol=1e-5)


@covers("set_layout_into_parameter")
@on_ranks(2)
def test_an_optimizer_of_torch_steps_the_sharded_parameter(world: World):
    if world.adapter.name != "torch":
        return
    import torch

    model = torch.nn.LSTM(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    old = model.weight_ih_l0
    new = world.platform.set_layout_into_parameter(old, rows_layout(world))
    assert any(parameter is new for parameter in optimizer.param_groups[0]["params"])
    assert not any(parameter is old for parameter in optimizer.param_groups[0]["params"])
    assert model._flat_weights[0] is new
    assert torch.isnan(old).all()
    assert old.shape == new.shape
    stepped = model.bias_ih_l0
    stepped.grad = torch.ones_like(stepped)
    optimizer.step()
    with pytest.raises(ValueError, match=r"an optimizer has already stepped .*give layouts before the first step"):
        world.platform.set_layout_into_parameter(stepped, rows_layout(world))
    assert model.bias_ih_l0 is stepped
