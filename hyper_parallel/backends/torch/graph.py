"""The autograd engine, as far as the schedule needs it: which backward runs, what it will still reach, when it ends."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Hashable
from typing import Any

import torch

from hyper_parallel.backends.torch import native
from hyper_parallel.core.activation_checkpoint.forecast import Reach

__all__ = ["GraphTask", "current_task", "is_in_backward", "next_sequence"]

_ENGINE: Any = torch.autograd.Variable._execution_engine  # torch._C._EngineBase
_NEVER_ORDERED = 2**63  # gradient accumulators carry the largest number there is


def is_in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


def next_sequence() -> int:
    """The number that the next node of this thread's graph will get."""
    return torch._C._autograd._get_sequence_nr()


class GraphTask:
    """The backward that runs on this thread now."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def reach(self) -> Reach:
        """Walk from the running node to everything it leads to."""
        node: Any = torch._C._current_autograd_node()  # torch.autograd.graph.Node | None
        if node is None:
            return lambda _first, _last: False
        extension = native.load()
        numbers = _reachable_numbers(node) if extension is None else extension.reachable_numbers()
        numbers.sort()
        known = set(numbers)

        def reaches(first: int, last: int) -> bool:
            if first == last:
                return first in known
            at = bisect.bisect_left(numbers, first)
            return at < len(numbers) and numbers[at] <= last

        return reaches

    def at_end(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the graph task is over; torch does not call it when backward raises."""
        _ENGINE.queue_callback(callback)


def _reachable_numbers(start: Any) -> list[int]:  # start: torch.autograd.graph.Node
    """Every backward pays for this walk: the fewer calls the better."""
    numbers: list[int] = []
    seen = {start}
    level = [start]
    while level:
        children = {child for node in level for child, _ in node.next_functions}
        children.discard(None)
        children -= seen
        seen |= children
        numbers += [node._sequence_nr() for node in level]
        level = list(children)
    return [number for number in numbers if number < _NEVER_ORDERED]


def current_task() -> GraphTask | None:
    """The backward of this thread; None outside one (a debugger that looks at ``grad_fn._saved_self``)."""
    key = torch._C._current_graph_task_id()
    return None if key == -1 else GraphTask(key)
