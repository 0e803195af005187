"""Copies that are launched together: one event before them, one switch of streams, one event after them.

What belongs to all copies of a batch is the event that they wait for and the completion that they share. What belongs to each
record alone is its residency, its lease and its device bytes.

Invariants
----------
1. The records of a batch are in one state before the launch and in one state after it. When a launch fails, all of them are
   as they were, and nothing that was queued is still running: the host has waited for the lane.
2. A copy out starts after everything that was queued on the stream that saved its source, up to the launch. A batch has
   records of one such stream only.
3. A load writes after all buffers of its batch were taken: the event is recorded behind the last allocation.
4. The completion is later than every copy of the batch. Ordering a stream after it once is enough for all its records, and
   :class:`StreamCompletion` remembers that. Each record still drops its own reference, one by one.
5. A record that waits for its batch is as one in the tail: its residency is ``DEVICE``, its bytes are readable, and a change in
   place is seen by its version. It can be launched alone at any time, and then its batch passes it over.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.activation_checkpoint.adapter import Completion, Stream
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.residency import Move, illegal, row_of

__all__ = ["load_together", "offload_together"]


def offload_together(records: Sequence[Record], lane: Stream) -> Completion:
    """Queue the copies out of records that have leases which move with others, and were saved on one stream."""
    engine, stream = records[0].engine, records[0].stream
    before, after = row_of(Move.START_OFFLOAD)
    for record in records:
        if record.residency is not before:
            raise illegal(record.residency, Move.START_OFFLOAD)
    pieces = [(record.lease, record.device_bytes) for record in records]
    try:
        with engine.backend.unseen():
            ready = engine.backend.record_event(stream)
            completion = engine.far.write_together(pieces, backend=engine.backend, stream=lane, ready=ready)
        for record in records:
            record.out = completion
            record.residency = after
    except BaseException:
        records[0].wait_for_lane(lane)
        raise
    return completion


def load_together(records: Sequence[Record], lane: Stream) -> tuple[Sequence[Record], Completion]:
    """Queue the copies back of records whose leases move with others, into buffers of the current stream's pool.

    Where the device has memory for some of the buffers only, the first records are loaded. Raises where it has memory for none.
    """
    engine = records[0].engine
    backend, owner = engine.backend, engine.backend.current_stream()
    before, after = row_of(Move.START_LOAD)
    for record in records:
        if record.residency is not before:
            raise illegal(record.residency, Move.START_LOAD)
    buffers = backend.allocate_all([record.nbytes for record in records])
    pieces = [(record.lease, buffer) for record, buffer in zip(records, buffers)]
    loaded = records[: len(pieces)]
    allocated = backend.record_event(owner)
    try:
        with backend.unseen():
            completion = engine.far.read_together(pieces, backend=backend, stream=lane, ready=allocated)
        for record, (_, buffer) in zip(loaded, pieces):
            record.back = completion
            record.receive(buffer, owner)
            record.residency = after
            engine.resident_bytes += record.nbytes
    except BaseException:
        records[0].wait_for_lane(lane)
        raise
    return loaded, completion
