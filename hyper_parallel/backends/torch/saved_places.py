"""What tracing a region's graph told: which ops were asked, and which of them each value that the graph saves comes from.

The ops that a region keeps are marked while the graph is traced (``graph_regions.py``). The partitioner then decides what the
graph saves. It is watched from the moment that a region is traced until the call that compiles it ends. Hooks around the graph
see what it saves in the same order, so that one graph can serve blocks that swap different values of it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import NamedTuple

from hyper_parallel.platform.torch import compat

__all__ = ["KeptOp", "OpKey", "TracedGraph", "end_watch", "traced_graph", "watch_saved_places"]

OpKey = tuple[str, str, int]  # base name, overload, and how many of this overload came before it in the region


class KeptOp(NamedTuple):
    """An op whose output a region keeps."""

    key: OpKey
    is_swapped: bool  # by the policy that was asked


@dataclasses.dataclass
class TracedGraph:
    """One traced graph."""

    asked: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # base name, overload
    is_marked: bool = True  # False: a release of torch that does not show the nodes of an op
    places: tuple[KeptOp | None, ...] | None = None  # for each value that hooks see; None: the partitioner was not seen


_GRAPHS: dict[int, TracedGraph] = {}  # by the number of the graph
_LOCK = threading.Lock()


def watch_saved_places(number: int) -> TracedGraph:
    """Begin to write down what the graph that is traced now saves."""

    def report(marks: tuple[KeptOp | None, ...]) -> None:
        graph.places = marks

    with _LOCK:
        graph = _GRAPHS[number] = TracedGraph()
        compat.watch_partition(report, number)
        return graph


def end_watch() -> None:
    """Leave torch's partitioner as it was."""
    with _LOCK:
        compat.end_watch_of_partition()


def traced_graph(number: int) -> TracedGraph | None:
    """What is known of a graph; None where it was not traced as a region."""
    return _GRAPHS.get(number)
