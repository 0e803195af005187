"""What a step takes of a host: time, and the part of it for which other programs had the processor.

On a busy machine the time of a step says what the other programs do. Its processor time does not: it is what the threads of
this process ran for. Divided by the number of threads that compute, it is near the time of a step on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["HostSeconds", "are_contended", "timed"]

_CONTENDED: Final = 0.2  # of its time: the computing thread waited for a processor for so long


class HostSeconds(NamedTuple):
    """What something took."""

    wall: float
    processor: float  # of all threads, divided by the number of those that compute
    waited: float  # for a processor, by the thread that computes; 0 where the kernel does not say

    @classmethod
    def now(cls, num_threads: int) -> HostSeconds:
        """Since some moment. ``num_threads``: how many compute."""
        return cls(time.perf_counter(), time.process_time() / num_threads, _waited())

    def since(self, before: HostSeconds) -> HostSeconds:
        """Between two moments."""
        return HostSeconds(*(after - start for after, start in zip(self, before)))


def timed(step: Callable[[], Any], num_threads: int) -> HostSeconds:
    """Run it."""
    before = HostSeconds.now(num_threads)
    step()
    return HostSeconds.now(num_threads).since(before)


def are_contended(found: Sequence[HostSeconds]) -> bool:
    """Whether other programs had the processors for so much of the time that times say little."""
    return sum(one.waited for one in found) > _CONTENDED * sum(one.wall for one in found)


def _waited() -> float:
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # a kernel without it
        return 0.0
