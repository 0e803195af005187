"""The ranks of a distributed run, as planning sees them."""

from __future__ import annotations

import torch

from hyper_parallel.backends.planning.world import RankedWorld
from hyper_parallel.backends.torch.ranks import presence

__all__ = ["RankedWorld", "world"]


def world() -> RankedWorld | None:
    """The ranks that must agree; None for one process."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    size = torch.distributed.get_world_size()
    return RankedWorld(torch.distributed.get_rank(), size, presence()) if size > 1 else None
