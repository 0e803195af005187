"""Parameters with a layout, seen as a whole: gathering their values, and the norm of their gradients.

Every rank of the layout must call: the parts travel between them.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import mint

from hyper_parallel.platform.mindspore.collectives import MindSporeCollectiveMembers
from hyper_parallel.platform.mindspore.groups import MindSporeGroupMembers, my_rank
from hyper_parallel.platform.mindspore.parameters import Part, part_of
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["counts_here", "gathered_norms", "ranks_that_share", "whole_values"]


def whole_values(param: Any) -> Any:  # mindspore.Tensor
    """The values of the whole parameter, without autograd history; a tensor without a layout is whole already."""
    part = part_of(param)
    if part is None or part.is_whole:
        return detached(param)
    pieces = _gathered(detached(param).contiguous(), part.ranks)
    rows = part.shape[0]
    whole = mint.zeros(part.whole_shape, dtype=param.dtype)
    for place, rank in enumerate(sorted(part.ranks)):
        whole[part.slices_of(rank)] = pieces[place * rows : (place + 1) * rows]
    return whole


def ranks_that_share(param: Any) -> tuple[int, ...] | None:
    """The ranks, ascending, that hold different parts of ``param``; None where every rank holds all of it."""
    part = part_of(param)
    return None if part is None or part.is_whole else tuple(sorted(part.ranks))


def counts_here(param: Any) -> bool:
    """Whether this rank is the first of those that hold the same part: a part that several hold counts once."""
    part = part_of(param)
    assert part is not None, "only a parameter with a layout is asked"
    return my_rank() == next(rank for rank in sorted(part.ranks) if _same_part(part, rank))


def _same_part(part: Part, rank: int) -> bool:
    return part.slices_of(rank) == part.slices


def gathered_norms(norm: Any, ranks: tuple[int, ...]) -> list[Any]:  # mindspore.Tensor with one element
    """Every rank's norm."""
    everyone = _gathered(norm.reshape(1), list(ranks))
    return [everyone[place] for place in range(len(ranks))]


def _gathered(tensor: Any, ranks: list[int]) -> Any:
    group = MindSporeGroupMembers.create_group(ranks)
    gathered: mindspore.Tensor = MindSporeCollectiveMembers.all_gather_into_tensor(tensor, group)
    return gathered
