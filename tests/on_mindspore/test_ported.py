"""Code written against the older interface on MindSpore, one snippet per class: it runs, and gives what it gave."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, nn

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint import CheckpointPolicy, SwapManager
from hyper_parallel.core.activation_checkpoint.swap import Storage, SwapTensor
from hyper_parallel.platform.mindspore.activation_checkpoint.activation_swap import (
    ActivationWrapper,
    FuncCell,
    SwapWrapper,
    base_check_fn,
    swap_wrapper,
)
from hyper_parallel.testing import simulated_accelerator

from .models import SmoothBlock

WIDTH = 4
SMALL = {"min_bytes": 0, "tail_bytes": 0}


def ones() -> Any:
    return mindspore.Tensor(np.ones((2, WIDTH), np.float32))


class Half(nn.Cell):
    """A cell with names of its own that subclasses of the wrapper use too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5
        self.proj = nn.Dense(WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        return self.proj(x) * self.scale


class Scaled(ActivationWrapper):
    """A subclass that keeps a number, and notes what it sees without naming it in its constructor."""

    def __init__(self, module: Any, scale: float) -> None:
        super().__init__(module)
        self.scale = scale

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        self.last_input = args[0]
        return self._ckpt_wrapped_module(*args, **kwargs) * self.scale


class Adapter(ActivationWrapper):
    """A subclass with a child, a parameter and a buffer."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.proj = nn.Dense(WIDTH, WIDTH)
        self.gain = Parameter(mindspore.mint.ones((WIDTH,)))
        self.register_buffer("shift", mindspore.mint.ones((WIDTH,)))

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self.proj(self._ckpt_wrapped_module(*args, **kwargs)) * self.gain + self.shift


class Net(nn.Cell):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def construct(self, x: Any) -> Any:
        return self.layer(x)


def test_what_a_subclass_sets_stays_on_the_wrapper() -> None:
    cell = Half()
    plain = cell.proj(ones()).asnumpy()
    one = Scaled(cell, 2)
    np.testing.assert_array_equal(one(ones()).asnumpy(), plain)  # 0.5 of the cell, times 2
    two = Scaled(one, 3)
    np.testing.assert_array_equal(two(ones()).asnumpy(), plain * 3)
    assert (two.scale, one.scale, cell.scale) == (3, 2, 0.5)
    assert "last_input" not in vars(cell)
    assert isinstance(two, Half)
    assert list(two.state_dict()) == list(cell.state_dict())
    two.note = "of other code"
    assert cell.note == "of other code"
    two.proj = nn.Dense(WIDTH, WIDTH, has_bias=False)
    assert cell.proj.bias is None


def test_what_a_subclass_registers_trains_and_is_saved_beside_the_cell() -> None:
    cell = Half()
    wrapper = hp.swap_wrapper(Adapter(cell))
    net = Net(wrapper)
    theirs = ["proj.weight", "proj.bias"]
    assert list(cell.state_dict()) == theirs
    assert set(wrapper.state_dict()) == {*theirs, "gain", "shift", "wrapper_proj.weight", "wrapper_proj.bias"}
    names = [parameter.name for parameter in net.trainable_params()]
    assert set(names) == {f"layer.{name}" for name in wrapper.state_dict()} - {"layer.shift"}
    gradients = mindspore.value_and_grad(lambda x: net(x).sum(), None, net.trainable_params())(ones())[1]
    assert all(gradient.asnumpy().any() for gradient in gradients)
    wanted = net(ones()).asnumpy()
    twin = copy.deepcopy(net)
    np.testing.assert_array_equal(twin(ones()).asnumpy(), wanted)
    twin.load_state_dict(net.state_dict())
    twin.layer.gain.set_data(twin.layer.gain * 2)
    assert not np.array_equal(twin(ones()).asnumpy(), wanted)
    np.testing.assert_array_equal(net(ones()).asnumpy(), wanted)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        wrapper.load_state_dict({**wrapper.state_dict(), "other": ones()})
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "gain"'):
        wrapper.load_state_dict(cell.state_dict())


def test_cells_and_attributes_have_their_older_names() -> None:
    function = FuncCell(mindspore.mint.sin)
    assert function._fn is mindspore.mint.sin
    function._fn = mindspore.mint.cos
    np.testing.assert_array_equal(function(ones()).asnumpy(), mindspore.mint.cos(ones()).asnumpy())
    cell, other = nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH)
    wrapper = swap_wrapper(cell)
    assert wrapper._ckpt_wrapped_module is cell
    wrapper._ckpt_wrapped_module = other
    assert wrapper.weight is other.weight
    assert base_check_fn(ones())

    def keep(tensor: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    kept = SwapWrapper(nn.Dense(WIDTH, WIDTH), policy_fn=keep)
    assert kept.policy_fn is keep
    with simulated_accelerator(**SMALL) as sim:
        mindspore.grad(lambda x: kept(x).sum())(ones())
        assert sim.events == []
        kept.policy_fn = None
        mindspore.grad(lambda x: (kept(x) ** 2).sum())(ones())
        assert [what for what, _ in sim.events][:1] == ["offload"]


class ByHand(nn.Cell):
    """A layer that puts what it saves into the group of the layer that runs, as ported code does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[SwapTensor] = []

    def construct(self, x: Any) -> Any:
        with mindspore.saved_tensors_hooks(self.pack, lambda swapped: swapped.get_val()):
            return mindspore.mint.exp(mindspore.mint.sin(x))

    def pack(self, tensor: Any) -> SwapTensor:
        storage, swapped = Storage(), SwapTensor(tensor, "by hand")
        storage.swap_storage["by hand"].append(swapped)
        SwapManager().add_storage(SwapManager().get_current_group_name() or "loose", storage)
        self.kept.append(swapped)
        return swapped


def test_a_declared_chain_drives_storages_that_a_user_put_in_its_groups() -> None:
    layers = [ByHand() for _ in range(3)]

    def run(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
        return x.sum()

    x = mindspore.Tensor(np.linspace(-1, 1, 8, dtype=np.float32))
    plain = mindspore.grad(run)(x).asnumpy()
    with simulated_accelerator(**SMALL) as sim:
        for first, second in itertools.pairwise(layers):
            SwapManager().set_forward_prefetch_layer(first, second)
        np.testing.assert_array_equal(mindspore.grad(run)(x).asnumpy(), plain)
        moves = [what for what, _ in sim.events if what in ("offload", "load")]
        assert moves.count("offload") == moves.count("load") > 0
        assert moves == ["offload"] * moves.count("offload") + ["load"] * moves.count("load")


def test_a_declared_layer_carries_the_name_and_the_neighbours_of_its_group() -> None:
    layers = [swap_wrapper(SmoothBlock()) for _ in range(3)]
    for first, second in itertools.pairwise(layers):
        SwapManager().set_forward_prefetch_layer(first, second)
    names = [layer._swap_group_name for layer in layers]
    assert all(name.startswith("swap_group_") for name in names)
    assert layers[1]._swap_group_order == {"prev": names[0], "next": names[2]}
    for twin in (copy.deepcopy(layers[1]), pickle.loads(pickle.dumps(layers[1]))):
        assert not twin._swap_group_name
        assert not twin._swap_group_order
