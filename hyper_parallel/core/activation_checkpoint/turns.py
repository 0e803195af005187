"""The order in which the backwards of several micro-batches will run, where a schedule knows it.

Without it the engine knows the backward that runs, and nothing of the next: what that needs comes back when it begins, and its
first value is late. With it, every record knows its *pass* (one micro-batch through one stage), every pass its turns, and loads
run ahead across the end of a backward, in the order of the backwards to come. A wrong order costs time, never a value.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

__all__ = ["Turns"]


class Turns:
    """What the schedule of a pipeline says; empty outside of its steps."""

    def __init__(self) -> None:
        self.packing: Hashable | None = None  # the pass whose forward runs now
        self._now = 0
        self._turns: Mapping[Any, Sequence[int]] = {}

    def begin(self, turns: Mapping[Any, Sequence[int]]) -> None:
        """A step begins, in which the backwards of each pass have these turns, in rising order."""
        self._turns, self._now, self.packing = turns, 0, None

    def end(self) -> None:
        """The step is over; what is saved from here on belongs to no pass."""
        self.begin({})

    def advance(self, now: int) -> None:
        """Turns before ``now`` are over."""
        self._now = now

    @property
    def is_known(self) -> bool:
        """Whether a schedule has said its order."""
        return bool(self._turns)

    def next_of(self, passes: Sequence[Hashable]) -> int | None:
        """The first turn of these passes that is not over; None where there is none."""
        found = [turn for key in passes for turn in self._turns.get(key, ()) if turn >= self._now]
        return min(found, default=None)

    def is_now(self, passes: Sequence[Hashable]) -> bool:
        """Whether these passes have the turn that runs."""
        return self.next_of(passes) == self._now
