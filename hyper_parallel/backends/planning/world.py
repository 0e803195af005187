"""The ranks of a distributed run, as planning sees them."""

from __future__ import annotations

from typing import Any, Final

from hyper_parallel.backends.planning.rank_presence import RankPresence
from hyper_parallel.config import current_config
from hyper_parallel.platform.platform import get_platform

__all__ = ["RankedWorld"]

_WHO: Final = "fit_memory"
_LOOK_SECONDS: Final = 10.0  # how long a rank looks for the lost one after a collective that broke


class RankedWorld:
    """Every rank of the default group. ``presence``: finds ranks that are lost; None where the framework has no store for it."""

    def __init__(self, rank: int, size: int, presence: RankPresence | None = None) -> None:
        self.rank = rank
        self._size = size
        self._presence = presence

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        rows: list[Any] = [None] * self._size
        if self._presence is None:
            get_platform().all_gather_object(rows, value)
            return rows
        seconds = current_config().rank_timeout_seconds
        self._presence.meet(seconds, who=_WHO)
        try:
            get_platform().all_gather_object(rows, value)
        except RuntimeError as error:
            lost = self._presence.find_lost(min(seconds, _LOOK_SECONDS), who=_WHO)
            if lost is None:
                raise
            raise lost from error
        return rows
