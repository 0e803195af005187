"""In which order backward will need records. A wrong forecast costs time, never a value.

The order is learned from execution, not declared: a record has the sequence number of the node that saved it, the
framework runs ready nodes from the highest number down, and a walk over the graph says which numbers this backward
can reach at all (so a dead branch or another micro-batch is not brought back). Where a framework cannot show its graph,
everything below the current number counts as reachable.

Where a schedule says which backwards follow (see ``turns``), what they need comes after it, in the order of their turns.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.turns import Turns

__all__ = ["Forecast", "Reach", "order_by_turns", "prefetch_order"]

Reach = Callable[[int, int], bool]  # (first sequence, last sequence) -> whether backward will run a node in between


def prefetch_order(records: Iterable[Record], reach: Reach) -> list[Record]:
    """The records that backward can reach, in the order in which it needs them."""
    wanted = [record for record in records if reach(record.position.first_sequence, record.position.sequence)]
    order = sorted([(-record.position.sequence, record.index, at) for at, record in enumerate(wanted)])
    return [wanted[at] for _, _, at in order]


def order_by_turns(records: Iterable[Record], turns: Turns) -> list[Record]:
    """The records of the passes whose backwards run now or later, those first that are needed first."""
    found = [(turn, record) for record in records if (turn := turns.next_of(record.passes)) is not None]
    found.sort(key=lambda row: (row[0], -row[1].position.sequence, row[1].index))
    return [record for _, record in found]


class Forecast:
    """The order for one backward, and how far ahead of it the loads are.

    ``departed`` takes the bytes of a record that died before it was asked for. Its destructor appends to it, on any thread and
    without a lock.
    """

    def __init__(self, records: Iterable[Record], reach: Reach, later: Iterable[Record] = ()) -> None:
        ordered = (*prefetch_order(records, reach), *later)
        self._queue: deque[weakref.ref[Record]] = deque([record.reference for record in ordered])
        self._ahead_bytes = 0
        self._touched: list[weakref.ref[Record]] = []
        self.departed: deque[int] = deque()

    def upcoming(self) -> Record | None:
        """The next live record that backward has not asked for yet; it stays at the head until :meth:`advance`."""
        while self._queue:
            record = self._queue[0]()
            if record is not None and not record.is_wanted:
                return record
            self._queue.popleft()
        return None

    def next_ones(self) -> Iterator[Record]:
        """All live records that backward has not asked for yet, from the head on; the head does not move."""
        for reference in self._queue:
            record = reference()
            if record is not None and not record.is_wanted:
                yield record

    def advance(self) -> None:
        """Drop the head: its load was launched, or it needs none."""
        self._queue.popleft()

    def put_back(self, records: Sequence[Record]) -> None:
        """Their loads failed: they are the next ones again, in this order."""
        self._queue.extendleft([record.reference for record in reversed(records)])

    def loaded(self, record: Record) -> None:
        """Count ``record`` among the records loaded ahead of their use, until :meth:`asked`."""
        if record.ahead_in is not None:
            record.ahead_in.asked(record)
        record.ahead_in = self
        self._touched.append(record.reference)
        self._ahead_bytes += record.nbytes

    def asked(self, record: Record) -> None:
        """Backward has asked for a record that was loaded ahead."""
        record.ahead_in = None
        self._ahead_bytes -= record.nbytes

    def ahead(self) -> list[Record]:
        """Records that were loaded and not asked for yet."""
        return [record for record in self.touched() if record.ahead_in is self]

    def ahead_bytes(self) -> int:
        """The same, in bytes."""
        while self.departed:
            self._ahead_bytes -= self.departed.popleft()
        return self._ahead_bytes

    def touch(self, record: Record) -> None:
        """Remember a record that this backward has used or loaded."""
        self._touched.append(record.reference)

    def touched(self) -> list[Record]:
        """The living ones among them."""
        return [record for reference in self._touched if (record := reference()) is not None]


def everything_below(position: Position) -> Reach:
    """The reach of a framework that cannot show its graph."""
    last = position.sequence
    return lambda first, _last: first <= last
