"""Which rank was lost, where a collective of a training step breaks because of it.

    with name_lost_ranks():
        loss = model(batch).mean()
        loss.backward()

Torch's own error names an address, and each rank that stops makes another one stop. Here every rank names the one that was
first. Nothing is sent while all goes well: each rank writes once where it runs, into the store of its process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.integrations.packages import needed

__all__ = ["name_lost_ranks"]

_OF_A_COLLECTIVE: Final = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "c10d")


@contextlib.contextmanager
def name_lost_ranks(*, look_seconds: float = 10.0) -> Iterator[None]:
    """Around a step: an error of a collective becomes one that names the rank that ended.

    Args:
        look_seconds: for how long that rank is looked for; where none is found, the error is torch's own.

    Raises:
        LostRankError: a rank of the default group has ended.
    """
    distributed = needed("torch.distributed", who="integrations.lost_ranks.name_lost_ranks")
    from hyper_parallel.backends.torch.ranks import presence

    here = presence()
    try:
        yield
    except RuntimeError as error:
        is_of_collective = isinstance(error, distributed.DistError) or any(
            word in str(error) for word in _OF_A_COLLECTIVE
        )
        if here is None or isinstance(error, HyperParallelError) or not is_of_collective:
            raise
        lost = here.find_lost(look_seconds, who="training step")
        if lost is None:
            raise
        raise lost from error
