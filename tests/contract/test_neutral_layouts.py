"""Layouts in words of no framework: the parts that ranks hold are those of the framework's own layouts."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from hyper_parallel.platform.platform import ParameterLayout

from .marks import covers, on_ranks
from .worker import World

WHOLE = np.arange(32, dtype=np.float32).reshape(8, 4)


def laid_out(world: World, layout: ParameterLayout):
    """A parameter with that layout, filled with ``WHOLE``."""
    platform = world.platform
    zeros = platform.new_zero_parameter(WHOLE.shape, platform.str_to_dtype("float32"), True, "cpu")
    parameter = platform.set_layout_into_parameter(zeros, layout)
    platform.load_into_param(parameter, world.adapter.tensor(WHOLE))
    return parameter


def held(world: World, parameter) -> np.ndarray:
    return world.adapter.numpy(world.platform.get_param_local_data(parameter))


@covers("set_layout_into_parameter", "get_param_local_data", "load_into_param")
@on_ranks(4)
def test_two_axes_cut_two_dims_and_one_axis_leaves_copies(world: World):
    first, second = divmod(world.rank, 2)
    mesh = {"dp": 2, "tp": 2}
    both = laid_out(world, ParameterLayout(mesh=mesh, dims=("tp", "dp")))
    np.testing.assert_array_equal(held(world, both), np.split(np.split(WHOLE, 2)[second], 2, 1)[first])
    one = laid_out(world, ParameterLayout(mesh=mesh, dims=(None, "dp")))
    np.testing.assert_array_equal(held(world, one), np.split(WHOLE, 2, 1)[first])
    none = laid_out(world, ParameterLayout(mesh=mesh, dims=(None, None)))
    np.testing.assert_array_equal(held(world, none), WHOLE)


@covers("set_layout_into_parameter", "clip_grad_norm_")
@on_ranks(4)
def test_a_part_of_the_world_has_a_layout_and_the_others_do_not_call(world: World):
    for ranks in ((1, 3), (0, 1, 2, 3)):
        if world.rank not in ranks:
            continue
        layout = ParameterLayout(mesh={"tp": len(ranks)}, dims=("tp", None), ranks=ranks)
        parameter = laid_out(world, layout)
        place = ranks.index(world.rank)
        np.testing.assert_array_equal(held(world, parameter), np.split(WHOLE, len(ranks))[place])
        zeros = world.platform.new_zero_parameter(WHOLE.shape, world.platform.str_to_dtype("float32"), True, "cpu")
        zeros.grad = world.adapter.tensor(WHOLE)
        cut = world.platform.set_layout_into_parameter(zeros, layout)
        assert float(world.platform.clip_grad_norm_([cut], 1.0)) == pytest.approx(np.linalg.norm(WHOLE), rel=1e-6)


@covers("set_layout_into_parameter")
@on_ranks(2)
def test_what_does_not_fit_is_refused_and_changes_nothing(world: World):
    platform = world.platform
    mistakes = [
        (ParameterLayout(mesh={"tp": 2}, dims=("tp",)), r"names 1 dims and the parameter has shape (8, 4)"),
        (ParameterLayout(mesh={"tp": 3}, dims=("tp", None)), r"dim 0 of shape (8, 4) does not divide into 3 parts"),
        (
            ParameterLayout(mesh={"tp": 4}, dims=("tp", None)),
            r"has 4 ranks and the world 2; give ParameterLayout(ranks=...)",
        ),
        (ParameterLayout(mesh={"tp": 2}, dims=("tp", None), ranks=(0, 5)), r"there is no rank 5 in a world of 2"),
        (
            ParameterLayout(mesh={"tp": 1}, dims=("tp", None), ranks=(1 - world.rank,)),
            f"rank {world.rank} holds nothing; because the layout is over the ranks [{1 - world.rank}]",
        ),
    ]
    for layout, message in mistakes:
        parameter = platform.new_zero_parameter(WHOLE.shape, platform.str_to_dtype("float32"), True, "cpu")
        with pytest.raises(ValueError, match=re.escape(message)):
            platform.set_layout_into_parameter(parameter, layout)
        assert tuple(platform.get_param_local_shape(parameter)) == WHOLE.shape


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesh": {}, "dims": ()}, "ParameterLayout.mesh: has no axis"),
        ({"mesh": {"tp": 0}, "dims": ("tp",)}, "axis 'tp' has 0 ranks"),
        ({"mesh": {"tp": True}, "dims": ("tp",)}, "axis 'tp' has True ranks"),
        ({"mesh": {"tp": 2}, "dims": ("pt",)}, "no axis 'pt' in the mesh; known are tp"),
        ({"mesh": {"tp": 2}, "dims": ("tp", "tp")}, "cuts two dims along one axis"),
        ({"mesh": {"tp": 2}, "dims": ("tp",), "ranks": (1, 0)}, "give every rank of the mesh once, ascending"),
        ({"mesh": {"tp": 2}, "dims": ("tp",), "ranks": (0, 1, 2)}, "does not fill a mesh of 2 ranks"),
    ],
)
def test_a_layout_validates_itself(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ParameterLayout(**fields)


def test_a_layout_is_a_value():
    layout = ParameterLayout(mesh={"dp": 2, "tp": 4}, dims=["tp", None])
    assert layout == ParameterLayout(mesh={"dp": 2, "tp": 4}, dims=("tp", None))
    assert (layout.num_ranks, layout.dims) == (8, ("tp", None))
    assert dataclasses.replace(layout, dims=(None,)).dims == (None,)
    ranks = tuple(range(10, 18))
    assert layout.ranks_along("tp", ranks, 15) == [14, 15, 16, 17]
    assert layout.ranks_along("dp", ranks, 15) == [11, 15]
