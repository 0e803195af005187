"""One record: the bytes of one storage, saved once in one forward.

A record knows where its bytes are, its lease of far memory, and the completion that makes each copy safe. It never knows
layers, modules or policies. It is owned by the handles that the autograd graph holds: when the last one dies the record
dies, and that is the only release there is.

Theory of operation: four orders, each a line below
---------------------------------------------------
1. *A copy out starts after the producer*: the tier orders the outgoing stream after an event that is recorded on the
   producer's stream when the copy is launched.
2. *Device bytes are dropped after the copy out*: their own stream is ordered after ``out`` before our reference goes.
3. *A load writes after the buffer is ours*: the incoming stream is ordered after an event recorded behind the
   allocation, because the allocator may hand out a block whose last kernels have not run yet.
4. *A consumer reads after the load*: its stream is ordered after ``back``.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.core.activation_checkpoint.adapter import (
    Completion,
    DeviceBackend,
    Event,
    FlatBytes,
    Stream,
    StreamCompletion,
    Tensor,
)
from hyper_parallel.core.activation_checkpoint.far.memory import unchecked
from hyper_parallel.core.activation_checkpoint.far.tier import Refusal
from hyper_parallel.core.activation_checkpoint.residency import Move, Residency, illegal, next_residency, row_of
from hyper_parallel.errors import FarMemoryError

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.engine import Engine
    from hyper_parallel.core.activation_checkpoint.forecast import Forecast
    from hyper_parallel.core.activation_checkpoint.source import Source

__all__ = ["Lanes", "Position", "Record"]

# Looked up once: these two moves are made one by one for every record.
_FINISH_OFFLOAD: Final = row_of(Move.FINISH_OFFLOAD)
_FINISH_LOAD: Final = row_of(Move.FINISH_LOAD)


class Lanes:
    """The two copy streams of one device. Separate, so that a load never queues behind a copy out."""

    __slots__ = ("back", "out")

    def __init__(self, backend: DeviceBackend) -> None:
        self.out: Stream = backend.new_stream()
        self.back: Stream = backend.new_stream()


class Position:
    """When backward will want a record: the higher ``sequence`` the sooner, then the lower ``index`` the sooner.

    A record that a node saved stands at that node's number. A record of a replayed region (an input, a swapped op
    output) is wanted when the replay begins, that is at the region's *end*, in forward order: the region moves the
    sequence of the position object that its records share.
    """

    __slots__ = ("first_sequence", "sequence")

    def __init__(self, sequence: int) -> None:
        self.first_sequence = sequence
        self.sequence = sequence


class Record:
    """The bytes of one saved storage. All moves are made under the engine's lock."""

    __slots__ = (
        "__weakref__",
        "_foreign_streams",
        "_is_ordered",
        "ahead_in",
        "back",
        "device_bytes",
        "engine",
        "group",
        "index",
        "is_protected",
        "is_wanted",
        "lease",
        "nbytes",
        "out",
        "passes",
        "position",
        "prepared",
        "reference",
        "residency",
        "shares",
        "snapshot_is_exact",
        "source",
        "stays",
        "stream",
        "tag",
    )

    def __init__(
        self,
        engine: Engine,
        device_bytes: FlatBytes,
        nbytes: int,
        *,
        position: Position,
        index: int = 0,
        group: object | None = None,
        tag: str | None = None,
        stays: bool = False,
        source: Source | None = None,
    ) -> None:
        self.engine = engine
        self.reference: weakref.ref[Record] = weakref.ref(self)
        self.device_bytes: FlatBytes | None = device_bytes
        self.nbytes = nbytes
        self.position = position
        self.index = index
        self.group = group
        self.tag = tag
        self.stays = stays  # it leaves only when a caller launches its copy
        self.is_protected = False  # an output of its group's layer: it stays until another layer saves it too
        self.source = source  # None: its owner drives every move
        self.residency = Residency.DEVICE
        self.stream: Stream = engine.backend.current_stream()
        self.lease: Any = None  # Lease | None; a record in flight or in far memory has one
        self.out: Completion | None = None
        self.back: Completion | None = None
        self.prepared: tuple[FlatBytes, Event, Stream] | None = (
            None  # the buffer of the next load, where it was taken already
        )
        self._foreign_streams: list[Stream] | None = None  # other streams than ``stream`` that were handed the bytes
        self._is_ordered = False  # the owner stream is, after the load that filled the bytes
        self.shares = 0  # saves beyond the first that this record serves
        self.snapshot_is_exact = False  # the far copy was ordered before anything that changed the source
        self.passes: tuple[Hashable, ...] = ()  # of a pipeline: those whose forward saved it
        self.ahead_in: Forecast | None = None  # the forecast that had it loaded and has not asked for it yet
        engine.live.add(self.reference)
        self.is_wanted = False  # unpacked by the backward that runs now

    @property
    def storage_key(self) -> int | None:
        """Names the storage of the source while that lives."""
        return None if self.source is None else self.source.storage_key

    @property
    def has_far_copy(self) -> bool:
        """Whether a copy out was queued, so that the device bytes can go without another one."""
        return self.out is not None

    def host_bytes(self) -> Tensor | None:
        """The far copy, where it lies in host memory and was written completely."""
        if self.lease is None or self.out is None:
            return None
        self.out.wait()
        return self.engine.far.host_bytes(self.lease)

    def start_offload(self, stream: Stream | None = None) -> Refusal | None:
        """Queue the copy out, unless a far copy exists already; a refusal leaves everything as it is."""
        target = next_residency(self.residency, Move.START_OFFLOAD)
        if self.out is None:
            refusal = self._write(self.engine.lanes.out if stream is None else stream)
            if refusal is not None:
                return refusal
        self.residency = target
        return None

    def reserve(self) -> Refusal | None:
        """Take a lease for the copy out. Where an earlier copy failed, its lease is still ours."""
        if self.lease is None:
            lease = self.engine.far.reserve(self.engine.backend, self.nbytes)
            if isinstance(lease, Refusal):
                return lease
            self.lease = lease
        return None

    def _write(self, lane: Stream) -> Refusal | None:
        engine = self.engine
        with engine.backend.unseen():
            refusal = self.reserve()
            if refusal is not None:
                return refusal
            assert self.lease is not None, "just taken"
            try:
                ready = engine.backend.record_event(self.stream)
                self.out = engine.far.write(
                    self.lease, self.device_bytes, backend=engine.backend, stream=lane, ready=ready
                )
            except MemoryError:
                return Refusal.NO_SPACE
            except BaseException:
                self.wait_for_lane(lane)
                raise
        return None

    def wait_for_lane(self, lane: Stream) -> None:
        """A copy failed half-way, or an interrupt came between two lines: wait for what was queued, nothing else waits for it."""
        backend = self.engine.backend
        with contextlib.suppress(Exception):  # the caller's error is the one to report
            end = backend.record_event(lane)
            backend.wait_event(backend.current_stream(), end)
            backend.synchronize_event(end)

    def finish_offload(self, current: Stream = None) -> None:
        """Order the stream that owns the device bytes after the copy, then let go of them.

        ``current``: the calling thread's stream, where the caller has asked for it.
        """
        source, target = _FINISH_OFFLOAD
        if self.residency is not source:
            raise illegal(self.residency, Move.FINISH_OFFLOAD)
        self._order_owner(current)
        if self.source is not None and self.back is None:
            self.snapshot_is_exact = self.source.is_unchanged()
        self.device_bytes = None
        engine, nbytes = self.engine, self.nbytes
        engine.resident_bytes -= nbytes  # the caller has the engine's lock
        engine.backend.dropped(nbytes)
        self.residency = target

    def cancel_offload(self) -> None:
        """Wanted again before it left: the device bytes are still valid, and the queued copy makes a valid far copy."""
        self.residency = next_residency(self.residency, Move.CANCEL_OFFLOAD)

    def prepare_load(self) -> None:
        """Take the buffer that the next load fills from the current stream's pool."""
        if self.prepared is None:
            backend = self.engine.backend
            stream = backend.current_stream()
            assert self.lease is not None, "a record in far memory has a lease"
            buffer = self.engine.far.allocate(backend, self.lease)
            self.prepared = buffer, backend.record_event(stream), stream
            self.engine.ledger.append(self.nbytes)

    def start_load(self, stream: Stream | None = None) -> None:
        """Queue the copy back into a buffer of the current stream's pool."""
        target = next_residency(self.residency, Move.START_LOAD)
        assert self.lease is not None, "a record in far memory has a lease"
        assert self.out is not None, "a record in far memory was written"
        engine = self.engine
        self.prepare_load()
        assert self.prepared is not None, "just made"
        buffer, allocated, owner = self.prepared
        lane = engine.lanes.back if stream is None else stream
        if not isinstance(self.out, StreamCompletion):  # a host tier orders the lane itself, behind the buffer
            self.out.order(lane)
        try:
            with engine.backend.unseen():
                self.back = engine.far.read(self.lease, buffer, backend=engine.backend, stream=lane, ready=allocated)
            self.prepared = None
            self.receive(buffer, owner)
            self.residency = target
        except BaseException:
            self.wait_for_lane(lane)
            raise

    def receive(self, buffer: FlatBytes, owner: Stream) -> None:
        """Hold the buffer that a queued load fills; ``owner`` is the stream from whose pool it was taken."""
        self._is_ordered = False
        self.stream = owner
        self.device_bytes = buffer

    def finish_load(self, *, reads: bool = True) -> None:
        """Order the current stream after the load; from here on its kernels may read the bytes.

        ``reads``: false for bytes that are dropped unread. No checksum is asked of those: a source that was changed in place
        while its copy ran is an error only where the bytes are read.
        """
        source, target = _FINISH_LOAD
        if self.residency is not source:
            raise illegal(self.residency, Move.FINISH_LOAD)
        assert self.back is not None, "a load is in flight"
        if not reads:
            self.back = unchecked(self.back)
        stream = self.engine.backend.current_stream()
        self.back.order(stream)
        self._is_ordered = stream == self.stream
        if not self._is_ordered:
            self._add_foreign(stream)
        self.residency = target

    @property
    def has_foreign_readers(self) -> bool:
        """Whether another stream than the one whose pool owns the buffer was handed the bytes."""
        return bool(self._foreign_streams)

    def _add_foreign(self, stream: Stream) -> None:
        if self._foreign_streams is None:
            self._foreign_streams = []
        if stream not in self._foreign_streams:
            self._foreign_streams.append(stream)

    def add_reader(self) -> None:
        """Remember a consumer on another stream than the one whose pool owns the buffer (see :meth:`_order_owner`)."""
        stream = self.engine.backend.current_stream()
        if stream != self.stream and stream not in (self._foreign_streams or ()):
            if self.back is not None:
                self.back.order(stream)
            self._add_foreign(stream)

    def _order_owner(self, current: Stream = None) -> None:
        """Nothing queued later on the owner stream may run before every copy and every foreign reader is done."""
        copy = self.out if self.back is None else self.back  # the last one that touches these very bytes
        if copy is not None and not self._is_ordered:
            if copy.__class__ is not StreamCompletion:
                copy = unchecked(copy)
            copy.order(self.stream)
            # The source is the user's: it may come from the pool of another stream than saved it.
            if self.back is None:
                stream = self.engine.backend.current_stream() if current is None else current
                if stream != self.stream:
                    copy.order(stream)
        if self._foreign_streams:
            for reader in self._foreign_streams:
                self.engine.backend.wait_event(self.stream, self.engine.backend.record_event(reader))
            self._foreign_streams = None

    def __del__(self) -> None:
        # Runs on whatever thread drops the last handle, at any point, also inside the engine: it takes no lock.
        if sys.is_finalizing() or not hasattr(self, "is_wanted"):
            return
        engine = self.engine
        engine.live.discard(self.reference)
        try:
            if self.device_bytes is not None:
                # Plain host memory is held by the copy itself, and has no stream-ordered pool to return to.
                if not engine.backend.is_host_memory and not (self._is_ordered and self._foreign_streams is None):
                    try:  # noqa: SIM105  # a context manager costs more than all of this
                        self._order_owner()
                    except FarMemoryError:  # a failed copy of bytes that no graph needs any more
                        pass
                self.device_bytes = None
                engine.ledger.append(-self.nbytes)
                engine.backend.dropped(self.nbytes)
            if self.prepared is not None:
                engine.ledger.append(-self.nbytes)
            if self.ahead_in is not None:
                self.ahead_in.departed.append(self.nbytes)
        finally:  # an interrupt may land here
            if self.lease is not None:
                engine.far.release(self.lease, self.back if self.back is not None else self.out)
