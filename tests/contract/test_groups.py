"""Ranks and groups: who I am, who belongs together, and that the cache never answers with the dead."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import GroupError, UnsupportedMemberError
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS, GroupInfo, Platform

from .marks import covers, on_ranks
from .worker import World

ANY_ORDER = [[2, 0], [1, 2], [0, 1, 3], [3, 2, 1, 0], [3]]


@covers("get_rank", "get_world_size", "get_group_local_rank")
def test_alone_i_am_rank_zero_of_one(platform):
    assert (platform.get_rank(), platform.get_world_size(), platform.get_group_local_rank()) == (0, 1, 0)


@covers("create_group", "_create_group")
def test_a_subclass_may_override_create_group_as_an_instance_method(platform, monkeypatch):
    class Naming(type(platform)):
        def _create_group(self, rank_list):
            return (self, rank_list)

    naming = Naming()
    monkeypatch.setattr(Naming, "_is_live_group", staticmethod(lambda group: True))
    monkeypatch.setitem(EXISTING_COMM_GROUPS, "(0,)", None)
    assert naming.create_group([0]) == (naming, [0])
    assert naming.get_created_group([0]) == (naming, [0])


def test_collectives_without_a_world_say_what_to_do(platform, adapter):
    with pytest.raises(GroupError, match=r"barrier: .*no process group exists; call init_process_group"):
        platform.barrier()
    with pytest.raises(GroupError, match=r"all_reduce: .*no process group exists"):
        platform.all_reduce(adapter.tensor([1.0]), None)


@covers("get_created_group", "create_group")
def test_bad_rank_lists_are_refused(platform):
    with pytest.raises(ValueError, match="create_group: an empty list of ranks names no group"):
        platform.create_group([])
    with pytest.raises(ValueError, match=r"create_group: \[1, 1\] names a rank twice"):
        platform.create_group([1, 1])
    with pytest.raises(ValueError, match="create_group: -1 is not a rank; ranks begin at 0"):
        platform.create_group([-1, 0])
    with pytest.raises(ValueError, match=r"cannot put rank 1 into a group; because the world has 1 ranks"):
        platform.create_group([0, 1])
    with pytest.raises(TypeError, match=r"get_created_group: cannot read .* as ranks; .* whole numbers"):
        platform.get_created_group([0.5])


def test_group_info_is_a_record_that_validates_itself():
    info = GroupInfo(group="handle", group_name="tp", rank_size=2)
    assert (info.group, info.group_name, info.rank_size) == ("handle", "tp", 2)
    with pytest.raises(ValueError, match=r"GroupInfo.rank_size: 0 is not the size of a group"):
        GroupInfo(group="handle", group_name="tp", rank_size=0)
    with pytest.raises(TypeError, match="positional argument"):
        GroupInfo("handle", "tp", 2)


@covers("create_group", "_create_group", "get_created_group", "mark_created_groups")
def test_the_cache_needs_no_framework():
    made = []

    class TwoRanks(Platform):
        """A platform whose groups are the lists they were made of."""

        @staticmethod
        def get_world_size():
            return 2

        @staticmethod
        def _create_group(rank_list):
            made.append(rank_list)
            return f"group of {rank_list}"

        @staticmethod
        def get_process_group_ranks(group=None):
            return [0]

    before = dict(EXISTING_COMM_GROUPS)
    EXISTING_COMM_GROUPS.clear()
    try:
        assert TwoRanks.get_created_group([0, 1]) is None
        assert TwoRanks.create_group([1, 0]) == TwoRanks().create_group((0, 1)) == "group of [0, 1]"
        assert made == [[0, 1]]
        TwoRanks.mark_created_groups(["mine", GroupInfo(group="last", group_name="n", rank_size=1)])
        assert EXISTING_COMM_GROUPS == {"(0, 1)": "group of [0, 1]", "(0,)": "last"}
        with pytest.raises(GroupError, match="mark_created_groups: cannot cache None"):
            TwoRanks.mark_created_groups(None)
    finally:
        EXISTING_COMM_GROUPS.clear()
        EXISTING_COMM_GROUPS.update(before)


def test_the_base_refuses_by_name():
    with pytest.raises(UnsupportedMemberError, match=r"Platform.get_rank: not available; .* Instead: .*get_platform"):
        Platform.get_rank()
    with pytest.raises(UnsupportedMemberError, match=r"Platform._create_group: not available"):
        Platform()._create_group([0])


@on_ranks(2, 4)
@covers(
    "get_rank", "get_world_size", "get_global_rank", "get_group_local_rank", "get_process_group_ranks", "get_backend"
)
def test_the_world_knows_itself(world: World):
    platform = world.platform
    assert (platform.get_rank(), platform.get_world_size()) == (world.rank, world.size)
    assert platform.get_group_local_rank() == world.rank
    assert platform.get_process_group_ranks() == list(range(world.size))
    assert [platform.get_global_rank(None, rank) for rank in range(world.size)] == list(range(world.size))
    assert platform.get_backend() in ("gloo", "mccl")
    with pytest.raises(GroupError, match=rf"get_global_rank: .*the group has {world.size} ranks"):
        platform.get_global_rank(None, world.size)


@on_ranks(2)
@covers("init_process_group")
def test_a_second_init_is_a_no_op(world: World):
    world.platform.init_process_group("gloo", init_method="tcp://nowhere.invalid:1", rank=0, world_size=9)
    assert (world.platform.get_rank(), world.platform.get_world_size()) == (world.rank, world.size)


@on_ranks(4)
@covers("create_group", "_create_group", "get_created_group", "get_global_rank", "get_group_local_rank")
def test_groups_of_any_ranks_in_any_order(world: World):
    platform, adapter = world.platform, world.adapter
    for ranks in ANY_ORDER:
        ascending = sorted(ranks)
        group = platform.create_group(ranks)
        assert platform.create_group(ascending) is group
        assert platform.get_created_group(tuple(ranks)) is group
        assert EXISTING_COMM_GROUPS[str(tuple(ascending))] is group
        if world.rank not in ranks:
            continue
        assert platform.get_process_group_ranks(group) == ascending
        assert platform.get_group_local_rank(group) == ascending.index(world.rank)
        assert [platform.get_global_rank(group, place) for place in range(len(ranks))] == ascending
        total = platform.all_reduce(adapter.tensor([float(10**world.rank)]), group)
        assert adapter.numpy(total) == sum(10**rank for rank in ranks)


@on_ranks(4)
@covers("get_group_local_rank", "all_reduce")
def test_outside_a_group_every_member_says_so(world: World):
    group = world.platform.create_group([1, 2])
    if world.rank in (1, 2):
        return
    with pytest.raises(GroupError, match=rf"get_group_local_rank: .*rank {world.rank}.*this rank is not in the group"):
        world.platform.get_group_local_rank(group)
    with pytest.raises(GroupError, match=r"all_reduce: .*this rank is not in the group"):
        world.platform.all_reduce(world.adapter.tensor([1.0]), group)
    with pytest.raises(GroupError, match=r"get_process_group_ranks: .*this rank is not in the group"):
        world.platform.get_process_group_ranks(group)


@on_ranks(4)
@covers("create_group")
def test_the_members_alone_may_create_a_group(world: World):
    if world.rank in (0, 3):
        group = world.platform.create_group([3, 0])
        total = world.platform.all_reduce(world.adapter.tensor([float(world.rank)]), group)
        assert world.adapter.numpy(total) == 3


@on_ranks(4)
@covers("split_group")
def test_split_into_one_part_or_several(world: World):
    platform, adapter = world.platform, world.adapter
    halves = platform.split_group(split_ranks=[[3, 0], [1, 2]])
    partner = {0: 3, 3: 0, 1: 2, 2: 1}[world.rank]
    assert platform.get_process_group_ranks(halves) == sorted([world.rank, partner])
    total = platform.all_reduce(adapter.tensor([float(10**world.rank)]), halves)
    assert adapter.numpy(total) == 10**world.rank + 10**partner
    three = platform.split_group(split_ranks=[0, 1, 3])
    assert (three is None) == (world.rank == 2)
    if three is not None:
        assert platform.get_process_group_ranks(three) == [0, 1, 3]
        pair = platform.split_group(three, [[1, 3]])
        assert (pair is None) == (world.rank == 0)
        with pytest.raises(
            ValueError, match=r"cannot split off \[2\]; because the parent has the global ranks \[0, 1, 3\]"
        ):
            platform.split_group(three, [[2, 3]])


@on_ranks(2)
@covers("split_group")
def test_a_split_of_nothing_is_refused(world: World):
    for nothing in (None, []):
        with pytest.raises(ValueError, match=r"split_group: .* splits nothing; give a list of ranks"):
            world.platform.split_group(split_ranks=nothing)
    with pytest.raises(ValueError, match="split_group: an empty list of ranks"):
        world.platform.split_group(split_ranks=[[]])
    with pytest.raises(ValueError, match=r"split_group: .* puts a rank into two parts"):
        world.platform.split_group(split_ranks=[[0, 1], [1]])
    with pytest.raises(ValueError, match=r"split_group: .* mixes ranks and lists"):
        world.platform.split_group(split_ranks=[0, [1]])
    with pytest.raises(ValueError, match="split_group: cannot wait for -1"):
        world.platform.split_group(split_ranks=[0, 1], timeout=-1)


@on_ranks(4)
@covers("barrier")
def test_nobody_leaves_a_barrier_before_the_last_has_come(world: World):
    flag = world.fresh_path("barrier-last")
    if world.rank == world.size - 1:
        flag.write_text("here")
    world.platform.barrier()
    assert flag.exists()
    work = world.platform.barrier(async_op=True)
    work.wait()
    group = world.platform.create_group([0, 2])
    if world.rank in (0, 2):
        assert world.platform.barrier(group) is None


@on_ranks(4)
@covers("all_gather_object")
def test_objects_of_all_ranks(world: World):
    mine = {"rank": world.rank, "much": "x" * (1 + 1000 * world.rank)}
    found = [None] * world.size
    world.platform.all_gather_object(found, mine)
    assert [entry["rank"] for entry in found] == list(range(world.size))
    assert [len(entry["much"]) for entry in found] == [1 + 1000 * rank for rank in range(world.size)]
    with pytest.raises(ValueError, match=rf"cannot put {world.size} objects into a list of 1"):
        world.platform.all_gather_object([None], mine)
    group = world.platform.create_group([2, 0])
    if world.rank in (0, 2):
        pair = [None, None]
        world.platform.all_gather_object(pair, world.rank, group)
        assert pair == [0, 2]


@on_ranks(2)
@covers("send_object_list", "recv_object_list")
def test_whole_lists_of_objects_travel(world: World):
    sent = [{"a": 1}, "two", [3, None], (4.5, "long" * 500)]
    if world.rank == 0:
        world.platform.send_object_list(sent, dst=1)
        answer = [None]
        assert world.platform.recv_object_list(answer, src=1) == 1
        assert answer == ["thanks"]
    else:
        received = [None] * len(sent)
        assert world.platform.recv_object_list(received, src=0) == 0
        assert received == sent
        world.platform.send_object_list(["thanks"], dst=0)
    with pytest.raises(GroupError, match=r"send_object_list: cannot talk to rank None; .*global ranks \[0, 1\]"):
        world.platform.send_object_list(sent)
    with pytest.raises(GroupError, match=r"recv_object_list: cannot talk to rank 7"):
        world.platform.recv_object_list([None], src=7)


@on_ranks(2)
@covers("destroy_process_group", "mark_created_groups", "get_created_group")
def test_destroyed_groups_leave_the_cache(world: World):
    platform = world.platform
    one, both = platform.create_group([world.rank]), platform.create_group([0, 1])
    platform.destroy_process_group(one)
    assert platform.get_created_group([world.rank]) is None
    assert platform.get_created_group([1, 0]) is both
    marked = platform.split_group(split_ranks=[[0], [1]])
    platform.mark_created_groups([marked])
    assert platform.create_group([world.rank]) is marked
    with pytest.raises(GroupError, match=r"get_backend: .*that group was destroyed; make it again with create_group"):
        platform.get_backend(one)


@on_ranks(2)
@covers("destroy_process_group", "init_process_group", "create_group")
def test_no_group_survives_its_world(world: World):
    if not world.adapter.can_rejoin:
        return
    platform, adapter = world.platform, world.adapter
    before = platform.create_group([0, 1])
    platform.destroy_process_group()
    assert (platform.get_rank(), platform.get_world_size(), EXISTING_COMM_GROUPS) == (0, 1, {})
    adapter.join(world.rank, world.size, world.fresh_path("second-world"))
    after = platform.create_group([0, 1])
    assert after is not before
    total = platform.all_reduce(adapter.tensor([1.0 + world.rank]), after)
    assert adapter.numpy(total) == 3
