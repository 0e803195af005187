"""Which of the values that a compiled graph saves are to be swapped, by their place in its list of saved values.

The ops that a policy swaps are marked while the graph is traced (``graph_regions.py``). The partitioner then decides what the
graph saves. It is watched from the moment that a region is traced until the call that compiles it ends.
"""

from __future__ import annotations

import threading

from hyper_parallel.platform.torch import compat

__all__ = ["end_watch", "saved_places", "watch_saved_places"]

_PLACES: dict[
    int, tuple[bool, ...]
] = {}  # by the number of the graph: for each value that hooks see, whether it is swapped
_LOCK = threading.Lock()


def watch_saved_places(graph: int) -> None:
    """Remember which values the graph saves that is partitioned next."""
    with _LOCK:
        compat.watch_partition(lambda is_marked: _PLACES.__setitem__(graph, is_marked), graph)


def end_watch() -> None:
    """Leave torch's partitioner as it was."""
    with _LOCK:
        compat.end_watch_of_partition()


def saved_places(graph: int) -> tuple[bool, ...] | None:
    """For each value that the graph saves, in order, whether it is swapped; None where that is not known."""
    return _PLACES.get(graph)
