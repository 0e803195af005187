"""Differentiable collectives: values and gradients are those of one process that holds all inputs."""

# ruff: noqa: B023 - every function made in a loop here is called before the loop goes on.

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel.errors import GroupError

from .marks import covers, on_ranks
from .one_process import compare, random_inputs
from .worker import World

OPS = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "mean": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "prod": lambda stacked: stacked.prod(0),
}


def subsets(world: World) -> list[list[int]]:
    """Groups in any rank order that this world can hold."""
    return [ranks for ranks in ([2, 0], [1, 2], [0, 1, 3], list(range(world.size))) if max(ranks) < world.size]


@on_ranks(2, 4)
@covers("differentiable_all_gather_concat")
def test_all_gather_concat_along_any_dim(world: World):
    for ranks in subsets(world):
        for dim in (0, 1, 2, -1, -3):
            compare(
                world,
                ranks,
                random_inputs(len(ranks), (2, 3, 4)),
                lambda x, group, me: world.platform.differentiable_all_gather_concat(x, group, len(ranks), dim),
                lambda xs: [torch.cat(xs, dim)] * len(xs),
            )


@on_ranks(2, 4)
@covers("differentiable_all_to_all")
def test_all_to_all_of_equal_pieces(world: World):
    for ranks in subsets(world):
        size = len(ranks)
        for shape in ((2 * size, 3), (size, 6), (2 * size, 3, 1)):
            compare(
                world,
                ranks,
                random_inputs(size, (2 * size, 3)),
                lambda x, group, me: world.platform.differentiable_all_to_all(x, shape, group),
                lambda xs: [
                    torch.cat([x.tensor_split(len(xs))[me] for x in xs]).reshape(shape) for me in range(len(xs))
                ],
            )


def factors(size: int, seed: int) -> list[np.ndarray]:
    """Small whole numbers: ties for max and min; columns with no zero, one, two and only zeros for prod."""
    random = np.random.default_rng(seed)
    arrays = [random.integers(1, 4, (3, 5)).astype(float) * random.choice([-1.0, 1.0], (3, 5)) for _ in range(size)]
    arrays[0][:, 1] = 0
    for array in arrays[:2]:
        array[:, 2] = 0
    for array in arrays:
        array[:, 3] = 0
    arrays[-1][:, 4] = 0
    return arrays


@on_ranks(2, 4)
@covers("differentiable_all_reduce")
def test_all_reduce_with_every_op(world: World):
    for ranks in subsets(world):
        for op, reduce in OPS.items():
            for inputs in (random_inputs(len(ranks), (3, 5)), factors(len(ranks), seed=1)):
                compare(
                    world,
                    ranks,
                    inputs,
                    lambda x, group, me: world.platform.differentiable_all_reduce(x, op, group),
                    lambda xs: [reduce(torch.stack(xs))] * len(xs),
                )


@on_ranks(2, 4)
@covers("differentiable_all_reduce")
def test_all_is_logical(world: World):
    platform, adapter = world.platform, world.adapter
    for dtype in ("float32", "int32", "bool"):
        values = np.array([[1, 1], [world.rank, 0]])
        data = adapter.tensor(values.T.copy(), dtype).T
        before = adapter.numpy(data)
        found = adapter.numpy(platform.differentiable_all_reduce(data, "all", None))
        assert found.dtype == np.bool_
        np.testing.assert_array_equal(found, [[True, True], [False, False]])
        np.testing.assert_array_equal(adapter.numpy(data), before)


@on_ranks(2)
@covers("differentiable_all_reduce", "differentiable_reduce_scatter")
def test_unknown_ops_are_refused_and_the_input_stays(world: World):
    platform, adapter = world.platform, world.adapter
    data = adapter.tensor(np.ones((2, 2)), "float32")
    for op in ("summ", "SUM", None):
        with pytest.raises(
            ValueError, match=r"differentiable_all_reduce: unknown op .*; known are sum, avg, mean, max, min, prod, all"
        ):
            platform.differentiable_all_reduce(data, op, None)
        with pytest.raises(ValueError, match=r"differentiable_reduce_scatter: unknown op .*; known are sum, avg"):
            platform.differentiable_reduce_scatter(data, 2, 0, op, None)
    with pytest.raises(ValueError, match=r"cannot average .*; because it has no fractions"):
        platform.differentiable_all_reduce(adapter.tensor([1, 2], "int32"), "avg", None)
    platform.differentiable_all_reduce(data, "sum", None)
    np.testing.assert_array_equal(adapter.numpy(data), np.ones((2, 2)))


@on_ranks(2, 4)
@covers("differentiable_reduce_scatter")
def test_reduce_scatter_along_any_axis_with_every_op(world: World):
    for ranks in subsets(world):
        size = len(ranks)
        shape = (size, 2 * size, 3 * size)
        for axis in (0, 1, -1):
            for op, reduce in OPS.items():
                compare(
                    world,
                    ranks,
                    random_inputs(size, shape),
                    lambda x, group, me: world.platform.differentiable_reduce_scatter(x, size, axis, op, group),
                    lambda xs: list(reduce(torch.stack(xs)).tensor_split(len(xs), axis)),
                )


@on_ranks(2)
@covers("differentiable_reduce_scatter", "differentiable_all_gather_concat", "differentiable_all_to_all")
def test_sizes_and_dims_that_do_not_fit_are_refused(world: World):
    platform, data = world.platform, world.adapter.tensor(np.ones((3, 4)), "float32")
    with pytest.raises(ValueError, match="concat_size=3 must be the group's size, which is 2"):
        platform.differentiable_all_gather_concat(data, None, 3, 0)
    with pytest.raises(
        ValueError, match=r"concat_dim=2 is not a dim of shape \(3, 4\); give a number between -2 and 1"
    ):
        platform.differentiable_all_gather_concat(data, None, 2, 2)
    with pytest.raises(ValueError, match="dev_num=4 must be the group's size, which is 2"):
        platform.differentiable_reduce_scatter(data, 4, 1, "sum", None)
    with pytest.raises(ValueError, match=r"cannot split dim 0 of shape \(3, 4\) among 2 ranks; .*multiple of 2"):
        platform.differentiable_reduce_scatter(data, 2, 0, "sum", None)
    with pytest.raises(ValueError, match=r"axis=-3 is not a dim"):
        platform.differentiable_reduce_scatter(data, 2, -3, "sum", None)
    with pytest.raises(ValueError, match=r"differentiable_all_to_all: cannot exchange shape \(3, 4\)"):
        platform.differentiable_all_to_all(data, (3, 4), None)


def row_counts(size: int, kind: str) -> list[list[int]]:
    """``counts[s][d]`` rows go from place s to place d."""
    if kind == "ragged":
        return [[(3 * source + 2 * target + 1) % 4 for target in range(size)] for source in range(size)]
    if kind == "one sender":
        return [[target if source == 0 else 0 for target in range(size)] for source in range(size)]
    return [[0] * size for _ in range(size)]


def exchanged(counts: list[list[int]]):
    """The oracle of a row exchange."""

    def oracle(xs):
        pieces = [x.split(row) for x, row in zip(xs, counts)]
        return [torch.cat([mine[target] for mine in pieces]) for target in range(len(xs))]

    return oracle


@on_ranks(2, 4)
@covers("differentiable_all_to_all_single", "differentiable_all_to_all_single_async")
def test_all_to_all_single_with_ragged_and_zero_rows(world: World):
    platform = world.platform
    for member in (platform.differentiable_all_to_all_single, platform.differentiable_all_to_all_single_async):
        for ranks in subsets(world):
            for kind in ("ragged", "one sender", "nothing"):
                for columns in ((), (3,), (2, 3)):
                    counts = row_counts(len(ranks), kind)
                    random = np.random.default_rng(3)
                    compare(
                        world,
                        ranks,
                        [random.normal(size=(sum(sent), *columns)) for sent in counts],
                        lambda x, group, me: member(x, counts[me], [sent[me] for sent in counts], group),
                        exchanged(counts),
                    )


@on_ranks(2)
@covers("differentiable_all_to_all_single", "differentiable_all_to_all_single_async")
def test_row_counts_that_do_not_fit_are_refused(world: World):
    platform, data = world.platform, world.adapter.tensor(np.ones((4, 2)), "float32")
    with pytest.raises(
        ValueError, match=r"differentiable_all_to_all_single: input_splits \[1, 2\] name 3 rows, .* has 4"
    ):
        platform.differentiable_all_to_all_single(data, [1, 2], [2, 2], None)
    with pytest.raises(ValueError, match=r"_async: output_splits=\[4\] must be 2 counts, one per rank"):
        platform.differentiable_all_to_all_single_async(data, [2, 2], [4], None)
    with pytest.raises(ValueError, match=r"input_splits=\[5, -1\] must be 2 counts, .*none negative"):
        platform.differentiable_all_to_all_single(data, [5, -1], [2, 2], None)


def launched(world: World, x, group, size: int, split_dim: int):
    """The first half of an exchange, outside the graph: piece r of ``split_dim`` is on its way to rank r."""
    pieces = np.stack(np.split(world.adapter.numpy(x), size, split_dim))
    out_perm, work = world.platform.all_to_all_single(world.adapter.tensor(pieces), pieces.shape, group, async_op=True)
    return work, out_perm


@on_ranks(2, 4)
@covers("differentiable_async_a2a_wait")
def test_async_a2a_wait_gives_the_true_gradient_without_a_box(world: World):
    for ranks in subsets(world):
        size = len(ranks)
        for concat_dim, split_dim in ((0, 1), (1, 0), (2, 1), (-1, -3), (1, 1), (0, 0)):

            def apply(x, group, me):
                work, out_perm = launched(world, x, group, size, split_dim)
                return world.platform.differentiable_async_a2a_wait(
                    x,
                    work,
                    out_perm,
                    group,
                    size,
                    concat_dim,
                    split_dim,
                )

            def oracle(xs):
                pieces = [x.tensor_split(size, split_dim) for x in xs]
                return [torch.cat([mine[me] for mine in pieces], concat_dim) for me in range(len(xs))]

            compare(world, ranks, random_inputs(size, (2 * size, size, 3)), apply, oracle)


@on_ranks(2, 4)
@covers("differentiable_async_a2a_wait")
def test_async_a2a_wait_with_a_box_returns_zeros_and_boxes_the_exchange(world: World):
    platform, adapter = world.platform, world.adapter
    size, concat_dim, split_dim = world.size, 0, 1
    x = random_inputs(size, (2, 3 * size))[world.rank].astype(adapter.gradient_dtype)
    weights = np.random.default_rng(5).normal(size=(size, 2 * size, 3)).astype(adapter.gradient_dtype)
    found = []
    for box in (None, []):

        def loss(t):
            work, out_perm = launched(world, t, None, size, split_dim)
            y = platform.differentiable_async_a2a_wait(t, work, out_perm, None, size, concat_dim, split_dim, box)
            return (y.T * adapter.tensor(weights[world.rank].T.copy())).sum()

        found.append((adapter.gradients(loss, x)[0], box))
    (true_gradient, _), (zeros, box) = found
    assert zeros.shape == x.shape
    assert np.any(true_gradient)
    assert not np.any(zeros)
    ((work, out_perm),) = box
    work.wait()
    assert tuple(out_perm.shape) == (size, 2, 3)
    np.testing.assert_allclose(np.concatenate(list(adapter.numpy(out_perm)), split_dim), true_gradient, rtol=1e-6)


@on_ranks(2)
@covers("differentiable_async_a2a_wait")
def test_async_a2a_wait_refuses_shapes_that_are_no_exchange(world: World):
    platform, adapter = world.platform, world.adapter
    x, wrong = adapter.tensor(np.ones((2, 4)), "float32"), adapter.tensor(np.ones((2, 4)), "float32")
    with pytest.raises(ValueError, match=r"cannot merge out_perm of shape \(2, 4\); .* has shape \(2, 2, 2\)"):
        platform.differentiable_async_a2a_wait(x, None, wrong, None, 2, 0, 1)
    with pytest.raises(ValueError, match="world_size=3 must be the group's size, which is 2"):
        platform.differentiable_async_a2a_wait(x, None, wrong, None, 3, 0, 1)


@on_ranks(2, 4)
@covers("p2p_exchange")
def test_p2p_exchange_swaps_values_and_gradients(world: World):
    partner = {0: 1, 1: 0, 2: 3, 3: 2}

    def oracle(xs):
        return [xs[partner[rank]] * 1.0 for rank in range(len(xs))]

    compare(
        world,
        list(range(world.size)),
        random_inputs(world.size, (2, 3)),
        lambda x, group, me: world.platform.p2p_exchange(x, partner[world.rank]),
        oracle,
    )
    if world.size == 4:
        compare(
            world,
            [3, 1],
            random_inputs(2, (2, 3)),
            lambda x, group, me: world.platform.p2p_exchange(x, {1: 3, 3: 1}[world.rank], group),
            lambda xs: [xs[1] * 1.0, xs[0] * 1.0],
        )
    mine = world.adapter.tensor([1.0])
    assert world.platform.p2p_exchange(mine, world.rank) is mine
    with pytest.raises(GroupError, match="p2p_exchange: cannot talk to rank 9"):
        world.platform.p2p_exchange(mine, 9)
