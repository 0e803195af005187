"""Ranks and groups on ``torch.distributed``.

A rank outside a group holds torch's ``NON_GROUP_MEMBER`` as its handle. torch's own collectives warn about that handle
and do nothing; here it is refused by name, because None would silently mean the world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hyper_parallel.errors import GroupError
from hyper_parallel.platform.base.groups import GroupMembers, bare_handle, group_key
from hyper_parallel.platform.base.unsupported import class_or_instance_method
from hyper_parallel.platform.torch import compat
from hyper_parallel.platform.torch.device import accelerator_type

__all__ = ["TorchGroupMembers", "live_group"]


def live_group(group: Any, *, member: str) -> dist.ProcessGroup:
    """The process group behind a handle, a record or None (the world); refused when I cannot take part in it."""
    handle = bare_handle(group)
    if not (dist.is_available() and dist.is_initialized()):
        raise GroupError(
            f"{member}: cannot reach other ranks; because no process group exists; call init_process_group(...) first"
        )
    if handle is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    if _is_non_member(handle):
        raise GroupError(
            f"{member}: cannot use this group on rank {dist.get_rank()}; because this rank is not in the group; "
            "call it on the group's ranks only"
        )
    if not isinstance(handle, dist.ProcessGroup):
        raise TypeError(
            f"{member}: cannot read {group!r} as a group; give a ProcessGroup, a GroupInfo, or None for the world"
        )
    if not _is_registered(handle):
        raise GroupError(
            f"{member}: cannot use {handle!r}; because that group was destroyed; make it again with create_group(...)"
        )
    return handle


def _is_non_member(handle: Any) -> bool:
    return handle is dist.GroupMember.NON_GROUP_MEMBER or handle == dist.GroupMember.NON_GROUP_MEMBER


def _is_registered(handle: dist.ProcessGroup) -> bool:
    try:
        dist.get_backend(handle)
    except (ValueError, RuntimeError):
        return False
    return True


def _as_timeout(timeout: Any, *, member: str) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout > 0:
        return timedelta(seconds=timeout)
    raise ValueError(f"{member}: cannot wait for {timeout!r}; give a timedelta or a positive number of seconds")


def _as_device(device_id: Any) -> torch.device | None:
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    return (
        torch.device(accelerator_type() or "cpu", device_id) if isinstance(device_id, int) else torch.device(device_id)
    )


def _default_backend() -> str:
    kind = accelerator_type() or "cpu"
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError:
        known = ", ".join(
            f"{backend} for {device}" for device, backend in dist.Backend.default_device_backend_map.items()
        )
        raise GroupError(
            f"init_process_group: cannot choose a backend for {kind}; because torch knows none for it ({known}); "
            "import the device's package first, or name a backend"
        ) from None


_groups_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""World to how often each set of ranks became a group in it: two groups of a world must not share a name."""


def _new_group(ranks: list[int], *, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
    world = live_group(None, member="create_group")
    if getattr(world, "bound_device_id", None) is not None:
        # NCCL then splits the world's communicator, and every rank of the world must take part in that.
        return dist.new_group(ranks, timeout=timeout, backend=backend, **options)
    if dist.get_rank() not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER
    made = _groups_made.setdefault(world, Counter())
    made[tuple(ranks)] += 1
    name = f"hyper_parallel_{'_'.join(map(str, ranks))}_{made[tuple(ranks)]}"
    named = {"pg_options": None, "group_desc": None, **options}
    return compat.new_named_group(ranks, name, timeout=timeout, backend=backend, **named)


def _split_lists(split_ranks: Any) -> list[list[int]]:
    if not isinstance(split_ranks, Sequence) or not split_ranks:
        raise ValueError(
            f"split_group: {split_ranks!r} splits nothing; give a list of ranks, or a list of such lists, not empty"
        )
    nested = [isinstance(part, Sequence) for part in split_ranks]
    if any(nested) and not all(nested):
        raise ValueError(f"split_group: {split_ranks!r} mixes ranks and lists; give one list of ranks, or only lists")
    parts = [list(group_key(part, member="split_group")) for part in (split_ranks if nested[0] else [split_ranks])]
    flat = [rank for part in parts for rank in part]
    if len(set(flat)) != len(flat):
        raise ValueError(f"split_group: {split_ranks!r} puts a rank into two parts; give every rank to one part only")
    return parts


class TorchGroupMembers(GroupMembers):
    """The contract of ranks and groups, served by ``torch.distributed``."""

    @staticmethod
    def get_rank() -> int:
        """My rank in the world; 0 when no process group exists."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @staticmethod
    def get_world_size() -> int:
        """How many ranks the world has; 1 when no process group exists."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @staticmethod
    def get_global_rank(group: Any, group_rank: int) -> int:
        """The world's number of a group's rank."""
        handle = live_group(group, member="get_global_rank")
        size = dist.get_world_size(handle)
        if not 0 <= group_rank < size:
            raise GroupError(
                f"get_global_rank: cannot find rank {group_rank} of the group; because the group has {size} ranks; "
                f"give a number between 0 and {size - 1}"
            )
        return dist.get_global_rank(handle, group_rank)

    @staticmethod
    def get_group_local_rank(group: Any = None) -> int:
        """My number in a group; an error when I am not in it."""
        if group is None:
            return TorchGroupMembers.get_rank()
        rank = dist.get_rank(live_group(group, member="get_group_local_rank"))
        if rank < 0:
            raise GroupError(
                f"get_group_local_rank: cannot number rank {dist.get_rank()}; because this rank is not in the group; "
                "call it on the group's ranks only"
            )
        return rank

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
        if dist.is_initialized():
            return
        dist.init_process_group(
            backend=backend if backend is not None else _default_backend(),
            init_method=init_method,
            timeout=_as_timeout(timeout, member="init_process_group"),
            world_size=world_size,
            rank=rank,
            store=store,
            pg_options=pg_options,
            device_id=_as_device(device_id),
        )

    @class_or_instance_method
    def destroy_process_group(cls, group: Any = None) -> None:
        """Leave a group, or the world and all groups; cached groups that died are forgotten."""
        handle = live_group(group, member="destroy_process_group")
        is_world = handle is dist.group.WORLD
        dist.destroy_process_group(handle)
        cls._forget_groups(None if is_world else handle)

    @staticmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """The world's numbers of a group's ranks, in group order."""
        return list(dist.get_process_group_ranks(live_group(group, member="get_process_group_ranks")))

    @staticmethod
    def get_backend(group: Any = None) -> str:
        """The name of a group's backend."""
        return str(dist.get_backend(live_group(group, member="get_backend")))

    @staticmethod
    def _create_group(rank_list: Any) -> Any:
        return _new_group(list(rank_list))

    @staticmethod
    def _is_live_group(group: Any) -> bool:
        if _is_non_member(group):
            return dist.is_initialized()
        return not isinstance(group, dist.ProcessGroup) or (dist.is_initialized() and _is_registered(group))

    @staticmethod
    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """Split a group by one list of global ranks, or several; returns the part I am in, or None."""
        parts = _split_lists(split_ranks)
        parent = live_group(parent_pg, member="split_group")
        parent_ranks = dist.get_process_group_ranks(parent)
        outside = sorted({rank for part in parts for rank in part} - set(parent_ranks))
        if outside:
            raise ValueError(
                f"split_group: cannot split off {outside}; because the parent has the global ranks {parent_ranks}; "
                "give only ranks of the parent"
            )
        mine = None
        for part in parts:
            made = _new_group(
                part,
                timeout=_as_timeout(timeout, member="split_group"),
                backend=dist.get_backend(parent),
                pg_options=pg_options,
                group_desc=group_desc,
            )
            mine = mine if _is_non_member(made) else made
        return mine

    @staticmethod
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        """Wait until every rank of the group is here; a handle when async, else None."""
        handle = live_group(group, member="barrier")
        on_device = accelerator_type() is not None and dist.get_backend(handle) != dist.Backend.GLOO
        if device_ids is None and on_device and getattr(handle, "bound_device_id", None) is None:
            device_ids = [torch.accelerator.current_device_index()]
        return dist.barrier(handle, async_op=async_op, device_ids=device_ids)

    @staticmethod
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list``, one place per rank of the group, with every rank's object."""
        handle = live_group(group, member="all_gather_object")
        size = dist.get_world_size(handle)
        if len(object_list) != size:
            raise ValueError(
                f"all_gather_object: cannot put {size} objects into a list of {len(object_list)}; "
                "give a list with one place per rank of the group, such as [None] * size"
            )
        dist.all_gather_object(object_list, obj, group=handle)

    @staticmethod
    def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
        """Send every object of the list to a global rank."""
        handle = live_group(group, member="send_object_list")
        dist.send_object_list(obj_list, dst=peer_in(handle, dst, member="send_object_list"), group=handle)

    @staticmethod
    def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> int:
        """Fill the list, as long as the sender's, with a global rank's objects; returns the sender."""
        handle = live_group(group, member="recv_object_list")
        if src is not None:
            src = peer_in(handle, src, member="recv_object_list")
        return int(dist.recv_object_list(obj_list, src=src, group=handle))


def peer_in(handle: dist.ProcessGroup, peer: int | None, *, member: str) -> int:
    """A global rank that I may talk to in this group; refused when it is missing or outside."""
    ranks = dist.get_process_group_ranks(handle)
    if peer is None or peer not in ranks:
        raise GroupError(
            f"{member}: cannot talk to rank {peer}; because the group has the global ranks {ranks}; name one of them"
        )
    return peer
