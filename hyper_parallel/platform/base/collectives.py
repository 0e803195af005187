"""Collectives without a gradient: the contract.

``group_info`` is a record with ``group``, ``group_name`` and ``rank_size``, or a bare handle; None is the world.
Ranks that appear as arguments are the world's numbers. Tensors need not be contiguous.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.base.unsupported import needs_framework

__all__ = ["CollectiveMembers"]


class CollectiveMembers:
    """Moving tensors between ranks, outside any graph."""

    @staticmethod
    def all_gather_into_tensor(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """Every rank's tensor, concatenated along dim 0 in group order; ``(tensor, handle)`` when async."""
        raise needs_framework("all_gather_into_tensor")

    @staticmethod
    def reduce_scatter_tensor(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """My chunk of dim 0 of the sum over ranks; ``(tensor, handle)`` when async."""
        raise needs_framework("reduce_scatter_tensor")

    @staticmethod
    def all_reduce(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """The sum over ranks, in place on ``data``; ``(data, handle)`` when async."""
        raise needs_framework("all_reduce")

    @staticmethod
    def all_to_all_single(input_tensor: Any, output_shape: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        """Piece r of dim 0 goes to rank r; always ``(output, work)``, where work is None unless async."""
        raise needs_framework("all_to_all_single")

    @staticmethod
    def broadcast(data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """The tensor of global rank ``src``, in place on ``data``; ``(data, handle)`` when async."""
        raise needs_framework("broadcast")

    @staticmethod
    def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start sending to a global rank; returns the work handle."""
        raise needs_framework("isend")

    @staticmethod
    def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from a global rank; returns the work handle."""
        raise needs_framework("irecv")
