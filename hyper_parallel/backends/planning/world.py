"""The ranks of a distributed run, as planning sees them."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.platform import get_platform

__all__ = ["RankedWorld"]


class RankedWorld:
    """Every rank of the default group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._size = size

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        rows: list[Any] = [None] * self._size
        get_platform().all_gather_object(rows, value)
        return rows
