"""Ranks and groups: the contract, and the cache of communication groups that every platform shares.

A group handle is opaque here: a ``ProcessGroup`` on torch, a group name on MindSpore. A group is known by its ranks,
ascending, whatever order they were listed in.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Final

from hyper_parallel.errors import GroupError
from hyper_parallel.platform.base.unsupported import class_or_instance_method, needs_framework

__all__ = ["EXISTING_COMM_GROUPS", "GroupInfo", "GroupMembers"]

EXISTING_COMM_GROUPS: Final[dict[str, Any]] = {}
"""Every group made or marked in this process: ``str(tuple(sorted(ranks)))`` to its handle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """A group as the collectives want it: the handle, its name, and how many ranks it has."""

    group: Any  # torch.distributed.ProcessGroup, or the group's name on MindSpore
    group_name: str
    rank_size: int

    def __post_init__(self) -> None:
        if self.rank_size < 1:
            raise ValueError(f"GroupInfo.rank_size: {self.rank_size} is not the size of a group; it must be at least 1")


def group_key(rank_list: Iterable[int], *, member: str) -> tuple[int, ...]:
    """The ascending ranks of a list, refused when it names no group."""
    try:
        ranks = sorted(operator.index(rank) for rank in rank_list)
    except TypeError as error:
        raise TypeError(
            f"{member}: cannot read {rank_list!r} as ranks; because {error}; give a list of whole numbers"
        ) from None
    if not ranks:
        raise ValueError(f"{member}: an empty list of ranks names no group; give at least one rank")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{member}: {list(rank_list)} names a rank twice; give every rank once")
    if ranks[0] < 0:
        raise ValueError(f"{member}: {ranks[0]} is not a rank; ranks begin at 0")
    return tuple(ranks)


def bare_handle(group: Any) -> Any:
    """The handle of a ``GroupInfo``-like record; anything else is a handle already."""
    return group.group if hasattr(group, "group") and hasattr(group, "rank_size") else group


class GroupMembers:
    """The rank of this process, the size of the world, and groups of ranks."""

    @staticmethod
    def get_rank() -> int:
        """My rank in the world; 0 when no process group exists."""
        raise needs_framework("get_rank")

    @staticmethod
    def get_world_size() -> int:
        """How many ranks the world has; 1 when no process group exists."""
        raise needs_framework("get_world_size")

    @staticmethod
    def get_global_rank(group: Any, group_rank: int) -> int:
        """The world's number of a group's rank."""
        raise needs_framework("get_global_rank")

    @staticmethod
    def get_group_local_rank(group: Any = None) -> int:
        """My number in a group; an error when I am not in it."""
        raise needs_framework("get_group_local_rank")

    @staticmethod
    def init_process_group(
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        """Join the world; the backend follows the device unless named. A second call does nothing."""
        raise needs_framework("init_process_group")

    @staticmethod
    def destroy_process_group(group: Any = None) -> None:
        """Leave a group, or the world and all groups; cached groups that died are forgotten."""
        raise needs_framework("destroy_process_group")

    @staticmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """The world's numbers of a group's ranks, in group order."""
        raise needs_framework("get_process_group_ranks")

    @staticmethod
    def get_backend(group: Any = None) -> str:
        """The name of a group's backend."""
        raise needs_framework("get_backend")

    @staticmethod
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Split a group by one list of global ranks, or several; returns the part I am in, or None."""
        raise needs_framework("split_group")

    @staticmethod
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        """Wait until every rank of the group is here; a handle when async, else None."""
        raise needs_framework("barrier")

    @staticmethod
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list``, one place per rank of the group, with every rank's object."""
        raise needs_framework("all_gather_object")

    @staticmethod
    def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
        """Send every object of the list to a global rank."""
        raise needs_framework("send_object_list")

    @staticmethod
    def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> int:
        """Fill the list, as long as the sender's, with a global rank's objects; returns the sender."""
        raise needs_framework("recv_object_list")

    @staticmethod
    def _create_group(rank_list: Any) -> Any:
        """Make a group of ascending, valid ranks. :meth:`create_group` calls it and caches the result."""
        raise needs_framework("_create_group")

    @class_or_instance_method
    def create_group(cls, rank_list: Any) -> Any:
        """The group of these ranks, in any order; made at the first call, cached afterwards.

        Ranks outside the list may call it too, and get a handle that every other member refuses. They must call it
        where the world was joined with ``device_id``: its communicator is then split by all ranks together.
        """
        ranks = group_key(rank_list, member="create_group")
        world_size = cls.get_world_size()
        if ranks[-1] >= world_size:
            raise ValueError(
                f"create_group: cannot put rank {ranks[-1]} into a group; because the world has {world_size} ranks; "
                f"give ranks between 0 and {world_size - 1}"
            )
        known = cls.get_created_group(ranks)
        if known is not None:
            return known
        group = cls._create_group(list(ranks))
        EXISTING_COMM_GROUPS[str(ranks)] = group
        return group

    @class_or_instance_method
    def get_created_group(cls, rank_list: Any) -> Any:
        """The cached group of these ranks, in any order, or None."""
        key = str(group_key(rank_list, member="get_created_group"))
        group = EXISTING_COMM_GROUPS.get(key)
        if group is not None and not cls._is_live_group(group):
            del EXISTING_COMM_GROUPS[key]
            return None
        return group

    @class_or_instance_method
    def mark_created_groups(cls, process_group: Any) -> None:
        """Put groups that other code made, one or a list, into the cache."""
        groups = process_group if isinstance(process_group, list | tuple) else [process_group]
        for group in groups:
            if group is None:
                raise GroupError(
                    "mark_created_groups: cannot cache None; because it names no group; give the handle that made it"
                )
            handle = bare_handle(group)
            ranks = group_key(cls.get_process_group_ranks(handle), member="mark_created_groups")
            EXISTING_COMM_GROUPS[str(ranks)] = handle

    @class_or_instance_method
    def _is_live_group(cls, group: Any) -> bool:
        """Whether a cached handle still stands for a group; a platform that can tell overrides this."""
        return True

    @class_or_instance_method
    def _forget_groups(cls, group: Any = None) -> None:
        """Drop one handle from the cache, or all of them."""
        for key, cached in list(EXISTING_COMM_GROUPS.items()):
            if group is None or cached is group or (isinstance(group, str) and cached == group):
                del EXISTING_COMM_GROUPS[key]
