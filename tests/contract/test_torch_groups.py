"""What only torch has among ranks and groups: its own destroy behind our back, timeouts and descriptions of groups."""

from __future__ import annotations

from datetime import timedelta

from .marks import on_ranks
from .worker import World


@on_ranks(2)
def test_a_world_destroyed_behind_our_back_leaves_no_stale_group(world: World):
    if world.adapter.name != "torch":
        return
    import torch.distributed as dist

    before = world.platform.create_group([0, 1])
    dist.destroy_process_group()
    world.adapter.join(world.rank, world.size, world.fresh_path("behind-our-back"))
    assert world.platform.get_created_group([0, 1]) is None
    assert world.platform.create_group([0, 1]) is not before


@on_ranks(2)
def test_split_honours_timeout_and_description(world: World):
    if world.adapter.name != "torch":
        return
    import torch

    group = world.platform.split_group(split_ranks=[[0, 1]], timeout=7.5, group_desc="a pair")
    assert group.group_desc == "a pair"
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=7.5)
