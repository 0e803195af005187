"""The ranks of torch's default group: which of them are there, and which share this host."""

from __future__ import annotations

import threading
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hyper_parallel.backends.planning.rank_presence import RankPresence
from hyper_parallel.platform.torch import compat

__all__ = ["local_processes", "presence"]

_PRESENCES: Final[WeakKeyDictionary[Any, RankPresence]] = (
    WeakKeyDictionary()
)  # by the default group: it may be made anew
_LOCK: Final = threading.Lock()


def presence() -> RankPresence | None:
    """This rank's presence in the default group; None for one process. Says to the others where it runs."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    with _LOCK:
        found = _PRESENCES.get(dist.group.WORLD)
        if found is None:
            found = RankPresence(compat.default_store(), dist.get_rank(), dist.get_world_size())
            _PRESENCES[dist.group.WORLD] = found
        return found


def local_processes() -> int:
    """How many ranks are on this host, as far as is known; see ``TensorAdapter.local_processes``."""
    try:
        here = presence()
    except RuntimeError:  # the group's store is gone: all ranks may be here
        return dist.get_world_size()
    return 1 if here is None else here.local_processes()
