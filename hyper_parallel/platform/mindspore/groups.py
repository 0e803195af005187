"""Ranks and groups on MindSpore.

A group handle is the group's name. MindSpore never forgets a name, and a group of a name that was destroyed cannot be
made again, so every group made here gets a name of its own, the same on all its ranks. Ranks outside a group hold a
name that says so. A world, once left, cannot be joined again by the same process.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import mindspore.mint.distributed as dist
from mindspore import communication

from hyper_parallel.errors import GroupError
from hyper_parallel.platform.base.groups import GroupMembers, bare_handle, group_key
from hyper_parallel.platform.base.unsupported import class_or_instance_method
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import on_cpu
from hyper_parallel.platform.mindspore.pending import flush

__all__ = ["MindSporeGroupMembers", "group_ranks", "live_group", "my_rank", "peer_in"]

_OUTSIDE: Final = "hyper_parallel_outside_"
"""How the name of a group begins on a rank that is not in it."""
_DEFAULT_TIMEOUT: Final = timedelta(seconds=300)


class _World:
    """What this process knows about its world; MindSpore's own answers differ between CPU and Ascend."""

    is_joined = False
    was_left = False
    ranks_of: Final[dict[str, tuple[int, ...]]] = {}
    destroyed: Final[set[str]] = set()
    made: Final[Counter[tuple[int, ...]]] = Counter()


def _is_joined() -> bool:
    if not _World.is_joined and compat.GlobalComm.INITED and not _World.was_left:
        _note_world()  # the world was joined with MindSpore's own call
    return _World.is_joined


def _note_world() -> None:
    compat.prime_streams()
    compat.remember_world(int(communication.get_rank()), int(communication.get_group_size()))
    _World.is_joined = True


def my_rank() -> int:
    """My rank in the world; 0 when there is none."""
    return int(communication.get_rank()) if _is_joined() else 0


def live_group(group: Any, *, member: str) -> str:
    """The name of a group behind a handle, a record or None (the world); refused when I cannot take part in it."""
    handle = bare_handle(group)
    if not _is_joined():
        raise GroupError(
            f"{member}: cannot reach other ranks; because no process group exists; call init_process_group(...) first"
        )
    if handle is None:
        return compat.world_name()
    if not isinstance(handle, str):
        raise TypeError(
            f"{member}: cannot read {group!r} as a group; give a group's name, a GroupInfo, or None for the world"
        )
    if handle.startswith(_OUTSIDE):
        raise GroupError(
            f"{member}: cannot use this group on rank {my_rank()}; because this rank is not in the group; "
            "call it on the group's ranks only"
        )
    if handle in _World.destroyed:
        raise GroupError(
            f"{member}: cannot use {handle!r}; because that group was destroyed; make it again with create_group(...)"
        )
    return handle


def group_ranks(name: str) -> list[int]:
    """The world's numbers of a live group's ranks, ascending."""
    if name == compat.world_name():
        return list(range(int(communication.get_group_size())))
    if name not in _World.ranks_of:
        _World.ranks_of[name] = tuple(int(rank) for rank in dist.get_process_group_ranks(name))
    return list(_World.ranks_of[name])


def peer_in(name: str, peer: int | None, *, member: str) -> int:
    """A global rank that I may talk to in this group; refused when it is missing or outside."""
    ranks = group_ranks(name)
    if peer is None or peer not in ranks:
        raise GroupError(
            f"{member}: cannot talk to rank {peer}; because the group has the global ranks {ranks}; name one of them"
        )
    return peer


def _as_timeout(timeout: Any, *, member: str) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
        return timedelta(seconds=timeout)
    raise ValueError(f"{member}: cannot wait for {timeout!r}; give a timedelta or a positive number of seconds")


def _new_group(ranks: list[int], pg_options: Any = None) -> str:
    live_group(None, member="create_group")
    if my_rank() not in ranks:
        return f"{_OUTSIDE}{'_'.join(map(str, ranks))}"
    key = tuple(ranks)
    _World.made[key] += 1
    name = f"hyper_parallel_{'_'.join(map(str, ranks))}_{_World.made[key]}"
    if pg_options is None:
        communication.create_group(name, ranks)
    else:
        communication.create_group(name, ranks, pg_options)
    _World.ranks_of[name] = key
    return name


def _split_lists(split_ranks: Any) -> list[list[int]]:
    if not isinstance(split_ranks, Sequence) or not split_ranks:
        raise ValueError(
            f"split_group: {split_ranks!r} splits nothing; give a list of ranks, or a list of such lists, not empty"
        )
    nested = [isinstance(part, Sequence) for part in split_ranks]
    if any(nested) and not all(nested):
        raise ValueError(f"split_group: {split_ranks!r} mixes ranks and lists; give one list of ranks, or only lists")
    parts = [list(group_key(part, member="split_group")) for part in (split_ranks if nested[0] else [split_ranks])]
    flat = list(itertools.chain.from_iterable(parts))
    if len(set(flat)) != len(flat):
        raise ValueError(f"split_group: {split_ranks!r} puts a rank into two parts; give every rank to one part only")
    return parts


def _store_of(init_method: str | None, rank: int, world_size: int, timeout: timedelta) -> Any:  # a dist.TCPStore
    """The store that ``init_method``, or the environment that torchrun and its like set, speaks of; None: neither."""
    if init_method is None or init_method == "env://":
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is None or port is None or rank < 0 or world_size < 1:
            return None
    else:
        place = urlsplit(init_method)
        if place.scheme != "tcp" or place.hostname is None or place.port is None:
            raise ValueError(f"init_process_group: cannot meet at {init_method!r}; give tcp://host:port, or env://")
        host, port = place.hostname, str(place.port)
    return dist.TCPStore(host, int(port), world_size, rank == 0, timeout)


class MindSporeGroupMembers(GroupMembers):
    """The contract of ranks and groups, served by ``mindspore.communication`` and ``mint.distributed``."""

    @staticmethod
    def get_rank() -> int:
        """My rank in the world; 0 when no process group exists."""
        return my_rank()

    @staticmethod
    def get_world_size() -> int:
        """How many ranks the world has; 1 when no process group exists."""
        return int(communication.get_group_size()) if _is_joined() else 1

    @staticmethod
    def get_global_rank(group: Any, group_rank: int) -> int:
        """The world's number of a group's rank."""
        ranks = group_ranks(live_group(group, member="get_global_rank"))
        if not 0 <= group_rank < len(ranks):
            raise GroupError(
                f"get_global_rank: cannot find rank {group_rank} of the group; because the group has {len(ranks)} "
                f"ranks; give a number between 0 and {len(ranks) - 1}"
            )
        return ranks[group_rank]

    @staticmethod
    def get_group_local_rank(group: Any = None) -> int:
        """My number in a group; an error when I am not in it."""
        if group is None:
            return my_rank()
        ranks = group_ranks(live_group(group, member="get_group_local_rank"))
        if my_rank() not in ranks:
            raise GroupError(
                f"get_group_local_rank: cannot number rank {my_rank()}; because this rank is not in the group; "
                "call it on the group's ranks only"
            )
        return ranks.index(my_rank())

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
        """Join the world; the backend follows the device unless named. A second call does nothing.

        With a store, an address or torchrun's environment no scheduler process is needed; without them MindSpore's own
        launchers (msrun, a scheduler, mpirun) say who I am.
        """
        if _is_joined():
            return
        if _World.was_left:
            raise GroupError(
                "init_process_group: cannot join a world again; because MindSpore does not let a process come back "
                "after destroy_process_group(); start a new process"
            )
        wait = _as_timeout(timeout, member="init_process_group") or _DEFAULT_TIMEOUT
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "-1"))
        world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "-1"))
        backend = backend or ("mccl" if on_cpu() else "hccl")
        store = store if store is not None else _store_of(init_method, rank, world_size, wait)
        if store is not None:
            compat.init_with_store(backend=backend, timeout=wait, world_size=world_size, rank=rank, store=store)
        else:
            communication.init(backend)
        _note_world()

    @class_or_instance_method
    def destroy_process_group(cls, group: Any = None) -> None:
        """Leave a group, or the world and all groups; cached groups that died are forgotten."""
        name = live_group(group, member="destroy_process_group")
        flush()
        if name != compat.world_name():
            dist.destroy_process_group(name)
            _World.destroyed.add(name)
            cls._forget_groups(name)
            return
        dist.destroy_process_group()
        compat.forget_world()
        _World.is_joined, _World.was_left = False, True
        _World.destroyed.update(_World.ranks_of)
        cls._forget_groups()

    @staticmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """The world's numbers of a group's ranks, in group order."""
        return group_ranks(live_group(group, member="get_process_group_ranks"))

    @staticmethod
    def get_backend(group: Any = None) -> str:
        """The name of a group's backend; all groups of a world share its."""
        live_group(group, member="get_backend")
        return compat.world_backend()

    @staticmethod
    def _create_group(rank_list: Any) -> str:
        return _new_group(list(rank_list))

    @class_or_instance_method
    def _is_live_group(cls, group: Any) -> bool:
        return _is_joined() and group not in _World.destroyed

    @staticmethod
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Split a group by one list of global ranks, or several; returns the part I am in, or None.

        MindSpore's groups have neither a timeout nor a description of their own; both are checked and not used.
        """
        parts = _split_lists(split_ranks)
        parent_ranks = group_ranks(live_group(parent_pg, member="split_group"))
        _as_timeout(timeout, member="split_group")
        outside = sorted({rank for part in parts for rank in part} - set(parent_ranks))
        if outside:
            raise ValueError(
                f"split_group: cannot split off {outside}; because the parent has the global ranks {parent_ranks}; "
                "give only ranks of the parent"
            )
        mine = [part for part in parts if my_rank() in part]
        return _new_group(mine[0], pg_options) if mine else None

    @staticmethod
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        """Wait until every rank of the group is here; a handle when async, else None."""
        from hyper_parallel.platform.mindspore.collectives import launched

        name = live_group(group, member="barrier")
        work = launched(lambda is_async: dist.barrier(group=name, async_op=is_async))
        if async_op:
            return work
        work.wait()
        return None

    @staticmethod
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list``, one place per rank of the group, with every rank's object."""
        name = live_group(group, member="all_gather_object")
        size = len(group_ranks(name))
        if len(object_list) != size:
            raise ValueError(
                f"all_gather_object: cannot put {size} objects into a list of {len(object_list)}; "
                "give a list with one place per rank of the group, such as [None] * size"
            )
        flush()
        dist.all_gather_object(object_list, obj, group=name)

    @staticmethod
    def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
        """Send every object of the list to a global rank."""
        name = live_group(group, member="send_object_list")
        flush()
        dist.send_object_list(obj_list, dst=peer_in(name, dst, member="send_object_list"), group=name)

    @staticmethod
    def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> int:
        """Fill the list, as long as the sender's, with a global rank's objects; returns the sender."""
        name = live_group(group, member="recv_object_list")
        # MindSpore has no receive from any rank, so the sender must be given.
        sender = peer_in(name, src, member="recv_object_list")
        flush()
        dist.recv_object_list(obj_list, src=sender, group=name)
        return sender
