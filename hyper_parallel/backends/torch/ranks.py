"""The ranks of torch's default group: which of them are there, and which share this host."""

from __future__ import annotations

import contextlib
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
    """This rank's presence in the default group. Says to the others where it runs.

    None for one process, and where the group has no store that can be written (MPI, or its keeper has ended).
    """
    if not _has_ranks():
        return None
    with _LOCK:
        found = _PRESENCES.get(dist.group.WORLD)
        store = compat.default_store() if found is None else None
        if store is not None:
            with contextlib.suppress(RuntimeError):
                found = RankPresence(store, dist.get_rank(), dist.get_world_size())
                _PRESENCES[dist.group.WORLD] = found
        return found


def local_processes() -> int:
    """How many ranks are on this host, as far as is known; see ``TensorAdapter.local_processes``."""
    if not _has_ranks():
        return 1
    here = presence()
    return dist.get_world_size() if here is None else here.local_processes()


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
