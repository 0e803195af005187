"""Wrappers leave no trace: names, state, copies and attributes are those of the wrapped cell."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn

import hyper_parallel as hp
from hyper_parallel.backends.mindspore import (
    ActivationWrapper,
    CheckpointWrapper,
    FuncCell,
    SwapWrapper,
    base_check_fn,
)

from .models import Block, Chain, SmoothBlock

WRAPPERS = {
    "swap": hp.swap_wrapper,
    "checkpoint": hp.checkpoint_wrapper,
    "both": lambda cell: hp.swap_wrapper(hp.checkpoint_wrapper(cell)),
}


class Stage(nn.Cell):
    """A child that is set by name, in a list, and held twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.more = nn.CellList([Block(), Block()])
        self.register_buffer("scale", mindspore.mint.ones((1,)))

    def construct(self, x: Any) -> Any:
        return self.more[1](self.more[0](self.block(x))) * self.scale


class Model(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.CellList([Stage(), Stage()])

    def construct(self, x: Any) -> Any:
        return self.stages[1](self.stages[0](x))


@pytest.fixture(params=sorted(WRAPPERS))
def wrap(request: pytest.FixtureRequest) -> Any:
    return WRAPPERS[request.param]


def names_of(model: Any) -> dict[str, Any]:
    """Everything that carries a name."""
    return {
        "parameters": [name for name, _ in model.parameters_and_names()],
        "own names": [parameter.name for parameter in model.get_parameters()],
        "cells": [name for name, _ in model.cells_and_names()],
        "buffers": [name for name, _ in model.named_buffers()],
        "state": list(model.state_dict()),
    }


def wrap_all(model: Any, wrap: Any) -> None:
    """Replace children that are registered already, one by name and the others in lists, the inner ones first."""
    for stage in model.stages:
        stage.block = wrap(stage.block)
        for index in range(2):
            stage.more[index] = wrap(stage.more[index])
    for index in range(2):
        model.stages[index] = wrap(model.stages[index])


def test_names_of_the_whole_model_stay(wrap: Any) -> None:
    model = Model()
    before = names_of(model)
    wrap_all(model, wrap)
    assert names_of(model) == before
    assert len(set(before["own names"])) == len(before["own names"]) == 36
    assert isinstance(vars(model.stages[0].unwrap_cell)["_cells"]["block"], nn.Cell)
    assert type(model.stages[0]).__name__ in ("SwapWrapper", "CheckpointWrapper")


def test_names_are_right_when_the_model_is_built_of_wrapped_layers(wrap: Any) -> None:
    plain, wrapped = Chain([Block() for _ in range(3)]), Chain([wrap(Block()) for _ in range(3)])
    assert names_of(wrapped) == names_of(plain)


def test_a_local_name_gets_the_prefix_and_a_full_one_keeps_its_own(wrap: Any) -> None:
    cell = wrap(nn.Dense(2, 2))
    cell.update_parameters_name("head.")
    assert [parameter.name for parameter in cell.get_parameters()] == ["head.weight", "head.bias"]
    cell.update_parameters_name("model.head.")
    assert [parameter.name for parameter in cell.get_parameters()] == ["model.head.weight", "model.head.bias"]
    cell.update_parameters_name("head.")
    assert [parameter.name for parameter in cell.get_parameters()] == ["model.head.weight", "model.head.bias"]


def test_states_pass_between_wrapped_and_plain(wrap: Any, tmp_path: Any) -> None:
    plain, wrapped = Model(), Model()
    wrap_all(wrapped, wrap)
    wrapped.load_state_dict(plain.state_dict())
    x = mindspore.Tensor(np.ones((2, 8), np.float32))
    np.testing.assert_array_equal(wrapped(x).asnumpy(), plain(x).asnumpy())
    path = str(tmp_path / "wrapped.ckpt")
    mindspore.save_checkpoint(wrapped, path)
    assert set(mindspore.load_checkpoint(path)) == {name for name, _ in plain.parameters_and_names()}
    fresh = Model()
    assert mindspore.load_param_into_net(fresh, mindspore.load_checkpoint(path)) == ([], [])
    np.testing.assert_array_equal(fresh(x).asnumpy(), plain(x).asnumpy())


def test_copies_and_pickles_are_wrapped_and_independent(wrap: Any) -> None:
    # A cell that holds an older primitive (LayerNorm) cannot be pickled by MindSpore itself.
    wrapped = Chain([wrap(SmoothBlock()) for _ in range(2)])
    x = mindspore.Tensor(np.ones((2, 8), np.float32))
    before = wrapped(x).asnumpy().copy()
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(twin.layers[0]) is type(wrapped.layers[0])
        assert names_of(twin) == names_of(wrapped)
        np.testing.assert_array_equal(twin(x).asnumpy(), before)
        weight = twin.layers[0].weight
        weight.set_data(weight * 2)
        assert not np.array_equal(twin(x).asnumpy(), before)
        np.testing.assert_array_equal(wrapped(x).asnumpy(), before)


class CopiesItself(SmoothBlock):
    """A cell whose class says how it is copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        return CopiesItself()


def test_a_copy_of_a_wrapped_cell_that_copies_itself_is_wrapped(wrap: Any) -> None:
    twin = copy.deepcopy(wrap(CopiesItself()))
    assert isinstance(twin, ActivationWrapper)
    assert type(twin.unwrap_cell) is CopiesItself


def test_attributes_are_read_and_written_in_the_wrapped_cell(wrap: Any) -> None:
    block = Block()
    wrapped = wrap(block)
    assert isinstance(wrapped, Block)
    assert isinstance(wrapped, ActivationWrapper)
    assert wrapped.unwrap_cell is block
    assert wrapped.up is block.up
    wrapped.note = "written"
    assert block.note == "written"
    del wrapped.note
    assert not hasattr(block, "note")
    wrapped.up = nn.Dense(8, 16, has_bias=False)
    assert block.up.bias is None
    wrapped.set_train()
    assert (wrapped.training, block.training, block.up.training) == (True, True, True)
    wrapped.set_train(False)
    assert (wrapped.training, block.training) == (False, False)
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'"):
        wrapped.nothing  # noqa: B018


def test_a_wrapped_list_is_a_list(wrap: Any) -> None:
    layers = wrap(nn.CellList([Block(), Block()]))
    assert (len(layers), [type(layer) for layer in layers]) == (2, [Block, Block])
    layers[1] = nn.Dense(2, 2)
    assert isinstance(layers[1], nn.Dense)
    del layers[0]
    assert len(layers) == 1
    assert bool(layers)


def test_a_function_is_adapted_and_anything_else_refused() -> None:
    assert isinstance(hp.swap_wrapper(lambda x: x).unwrap_cell, FuncCell)
    for wrapper in (SwapWrapper, CheckpointWrapper):
        with pytest.raises(TypeError, match=rf"{wrapper.__name__}: expected a cell or a callable, got 3"):
            wrapper(3)
    with pytest.raises(TypeError, match=r"FuncCell: expected a callable, got 'x'"):
        FuncCell("x")
    with pytest.raises(ValueError, match=r"checkpoint_wrapper: use_reentrant=True is not supported"):
        hp.checkpoint_wrapper(Block(), use_reentrant=True)
    with pytest.raises(TypeError, match=r"ActivationWrapper: cannot be made, because it is abstract"):
        ActivationWrapper(Block())


def test_what_can_be_swapped_at_all() -> None:
    assert base_check_fn(mindspore.Tensor([1.0]))
    for value in (3, None, mindspore.Parameter(mindspore.Tensor([1.0])), mindspore.mint.zeros((0, 3))):
        assert not base_check_fn(value)
