"""Collectives without a gradient: values, strides, sub-groups, and that asynchronous means asynchronous."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hyper_parallel.errors import GroupError
from hyper_parallel.platform.platform import GroupInfo

from .marks import covers, on_ranks
from .worker import World

SUBSETS = [[2, 0], [1, 2], [0, 1, 3]]


def rows(rank: int, count: int = 3, columns: int = 2) -> np.ndarray:
    """Values that no two ranks share."""
    return (100 * (rank + 1) + np.arange(count * columns, dtype=np.float32)).reshape(count, columns)


def my_groups(world: World):
    """(ascending ranks, handle) of every test group that I am in; the whole world is one of them."""
    for ranks in [*SUBSETS, list(range(world.size))]:
        if max(ranks) < world.size:
            group = world.platform.create_group(ranks)
            if world.rank in ranks:
                yield sorted(ranks), group


@on_ranks(2, 4)
@covers("all_gather_into_tensor")
def test_all_gather_grows_dim_zero(world: World):
    platform, adapter = world.platform, world.adapter
    expected = np.concatenate([rows(rank) for rank in range(world.size)])
    mine = adapter.tensor(rows(world.rank))
    np.testing.assert_array_equal(adapter.numpy(platform.all_gather_into_tensor(mine, None)), expected)
    gathered, work = platform.all_gather_into_tensor(mine, None, async_op=True)
    work.wait()
    np.testing.assert_array_equal(adapter.numpy(gathered), expected)
    np.testing.assert_array_equal(adapter.numpy(mine), rows(world.rank))
    for ranks, group in my_groups(world):
        info = GroupInfo(group=group, group_name="some", rank_size=len(ranks))
        strided = adapter.tensor(rows(world.rank).T.copy()).T
        found = adapter.numpy(platform.all_gather_into_tensor(strided, info))
        np.testing.assert_array_equal(found, np.concatenate([rows(rank) for rank in ranks]))


@on_ranks(2, 4)
@covers("reduce_scatter_tensor")
def test_reduce_scatter_gives_my_chunk_of_the_sum(world: World):
    platform, adapter = world.platform, world.adapter
    count = 12
    total = sum(rows(rank, count) for rank in range(world.size))
    chunk = total.reshape(world.size, -1, 2)[world.rank]
    strided = adapter.tensor(rows(world.rank, count).T.copy()).T
    np.testing.assert_array_equal(adapter.numpy(platform.reduce_scatter_tensor(strided, None)), chunk)
    output, work = platform.reduce_scatter_tensor(strided, None, async_op=True)
    work.wait()
    np.testing.assert_array_equal(adapter.numpy(output), chunk)
    for ranks, group in my_groups(world):
        total = sum(rows(rank, count) for rank in ranks)
        found = adapter.numpy(platform.reduce_scatter_tensor(strided, group))
        np.testing.assert_array_equal(found, total.reshape(len(ranks), -1, 2)[ranks.index(world.rank)])
    with pytest.raises(ValueError, match=rf"cannot scatter shape \(5, 2\) over {world.size} ranks; .*multiple of"):
        platform.reduce_scatter_tensor(adapter.tensor(rows(world.rank, 5)), None)


@on_ranks(2, 4)
@covers("all_reduce")
def test_all_reduce_is_in_place_whatever_the_strides(world: World):
    platform, adapter = world.platform, world.adapter
    for ranks, group in my_groups(world):
        total = sum(rows(rank) for rank in ranks)
        dense, strided = adapter.tensor(rows(world.rank)), adapter.tensor(rows(world.rank).T.copy()).T
        for data in (dense, strided):
            assert platform.all_reduce(data, group) is data
            np.testing.assert_array_equal(adapter.numpy(data), total)
        dense, strided = adapter.tensor(rows(world.rank)), adapter.tensor(rows(world.rank).T.copy()).T
        for data in (dense, strided):
            same, work = platform.all_reduce(data, group, async_op=True)
            work.wait()
            assert same is data
            np.testing.assert_array_equal(adapter.numpy(data), total)
            work.wait()
            np.testing.assert_array_equal(adapter.numpy(data), total)


@on_ranks(2, 4)
@covers("all_to_all_single")
def test_all_to_all_single_exchanges_equal_pieces(world: World):
    platform, adapter = world.platform, world.adapter
    for ranks, group in my_groups(world):
        me, size = ranks.index(world.rank), len(ranks)
        strided = adapter.tensor(rows(world.rank, 2 * size).T.copy()).T
        pieces = [rows(rank, 2 * size).reshape(size, 2, 2)[me] for rank in ranks]
        output, work = platform.all_to_all_single(strided, (2 * size, 2), group)
        assert work is None
        np.testing.assert_array_equal(adapter.numpy(output), np.concatenate(pieces))
        output, work = platform.all_to_all_single(strided, (size, 4), group, async_op=True)
        work.wait()
        np.testing.assert_array_equal(adapter.numpy(output), np.concatenate(pieces).reshape(size, 4))
    mine = adapter.tensor(rows(world.rank, world.size))
    with pytest.raises(ValueError, match=r"all_to_all_single: cannot exchange shape .* into \(\d+, 3\)"):
        platform.all_to_all_single(mine, (world.size, 3), None)
    with pytest.raises(ValueError, match=rf"dim 0 divisible by {world.size}"):
        platform.all_to_all_single(adapter.tensor(rows(0, world.size + 1)), (world.size + 1, 2), None)


@on_ranks(2, 4)
@covers("broadcast")
def test_broadcast_from_a_global_rank(world: World):
    platform, adapter = world.platform, world.adapter
    for ranks, group in my_groups(world):
        for src in ranks:
            for data in (adapter.tensor(rows(world.rank)), adapter.tensor(rows(world.rank).T.copy()).T):
                assert platform.broadcast(data, src, group) is data
                np.testing.assert_array_equal(adapter.numpy(data), rows(src))
            strided = adapter.tensor(rows(world.rank).T.copy()).T
            same, work = platform.broadcast(strided, src, group, async_op=True)
            work.wait()
            assert same is strided
            np.testing.assert_array_equal(adapter.numpy(strided), rows(src))
        outside = sorted({-1, *range(world.size)} - set(ranks))[0]
        with pytest.raises(GroupError, match=rf"broadcast: cannot talk to rank {outside}; .*global ranks"):
            platform.broadcast(adapter.tensor(rows(0)), outside, group)


@on_ranks(2)
@covers("broadcast", "all_to_all_single")
def test_async_returns_before_completion(world: World):
    """Rank 1 cannot finish while rank 0, which it waits for, has not begun; so its handle must come back unfinished."""
    platform, adapter = world.platform, world.adapter
    for name in ("broadcast", "all_to_all_single"):
        data, seen = adapter.tensor(rows(world.rank, 4)), world.fresh_path(f"async-{name}")
        if world.rank == 0:
            while not seen.exists():
                time.sleep(0.002)
        if name == "broadcast":
            output, work = platform.broadcast(data, 0, None, async_op=True)
            expected = rows(0, 4)
        else:
            output, work = platform.all_to_all_single(data, (4, 2), None, async_op=True)
            expected = np.concatenate([rows(rank, 4).reshape(2, 2, 2)[world.rank] for rank in range(2)])
        if world.rank == 1:
            # Rank 0 takes part only once this file exists: a call that waited for it would never come here.
            assert not work.is_completed()
            seen.write_text("returned")
        work.wait()
        assert work.is_completed()
        np.testing.assert_array_equal(adapter.numpy(output), expected)


@on_ranks(2, 4)
@covers("isend", "irecv")
def test_isend_and_irecv_around_a_ring(world: World):
    platform, adapter = world.platform, world.adapter
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    strided = adapter.tensor(rows(world.rank).T.copy()).T
    dense_target, strided_target = adapter.tensor(rows(9)), adapter.tensor(rows(9).T.copy()).T
    for target in (dense_target, strided_target):
        works = [platform.isend(strided, following), platform.irecv(target, previous)]
        for work in works:
            work.wait()
        np.testing.assert_array_equal(adapter.numpy(target), rows(previous))
    with pytest.raises(GroupError, match=r"isend: cannot talk to rank None; because the group has the global ranks"):
        platform.isend(strided)
    with pytest.raises(GroupError, match=r"irecv: cannot talk to rank 9"):
        platform.irecv(dense_target, 9)


@on_ranks(4)
@covers("isend", "irecv")
def test_ranks_in_a_group_are_the_worlds_numbers_and_tags_tell_messages_apart(world: World):
    platform, adapter = world.platform, world.adapter
    group = platform.create_group([3, 1])
    if world.rank == 1:
        for work in [platform.isend(adapter.tensor(rows(tag)), 3, group, tag) for tag in (1, 2)]:
            work.wait()
    if world.rank == 3:
        targets = {tag: adapter.tensor(rows(9)) for tag in (2, 1)}
        for work in [platform.irecv(target, 1, group, tag) for tag, target in targets.items()]:
            work.wait()
        for tag, target in targets.items():
            np.testing.assert_array_equal(adapter.numpy(target), rows(tag))
