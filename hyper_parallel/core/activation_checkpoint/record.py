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
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

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
from hyper_parallel.core.activation_checkpoint.far.tier import Lease, Refusal
from hyper_parallel.core.activation_checkpoint.residency import Move, Residency, next_residency
from hyper_parallel.errors import FarMemoryError

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.engine import Engine
    from hyper_parallel.core.activation_checkpoint.forecast import Forecast

__all__ = ["Lanes", "Position", "Record"]


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
        "_prepared",
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
        "residency",
        "shares",
        "snapshot_is_exact",
        "source_is_unchanged",
        "stays",
        "storage_key",
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
        storage_key: int | None = None,
        source_is_unchanged: Callable[[], bool] | None = None,
    ) -> None:
        self.engine = engine
        self.device_bytes: FlatBytes | None = device_bytes
        self.nbytes = nbytes
        self.position = position
        self.index = index
        self.group = group
        self.tag = tag
        self.stays = stays  # it leaves only when a caller launches its copy
        self.is_protected = False  # an output of its group's layer: it stays until another layer saves it too
        self.storage_key = storage_key
        self.residency = Residency.DEVICE
        self.stream: Stream = engine.backend.current_stream()
        self.lease: Lease | None = None
        self.out: Completion | None = None
        self.back: Completion | None = None
        self._prepared: tuple[FlatBytes, Event, Stream] | None = None
        self._foreign_streams: list[Stream] = []
        self._is_ordered = False  # the owner stream is, after the load that filled the bytes
        self.shares = 0  # saves beyond the first that this record serves
        self.source_is_unchanged = source_is_unchanged
        self.snapshot_is_exact = False  # the far copy was ordered before anything that changed the source
        self.passes: tuple[Hashable, ...] = ()  # of a pipeline: those whose forward saved it
        self.ahead_in: Forecast | None = None  # the forecast that had it loaded and has not asked for it yet
        engine.ledger.append(nbytes)
        engine.live[id(self)] = weakref.ref(self)
        self.is_wanted = False  # unpacked by the backward that runs now

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

    def finish_offload(self) -> None:
        """Order the stream that owns the device bytes after the copy, then let go of them."""
        target = next_residency(self.residency, Move.FINISH_OFFLOAD)
        self._order_owner()
        if self.source_is_unchanged is not None and self.back is None:
            self.snapshot_is_exact = self.source_is_unchanged()
        self._drop_device_bytes()
        self.residency = target

    def _drop_device_bytes(self) -> None:
        self.device_bytes = None
        self.engine.ledger.append(-self.nbytes)
        self.engine.backend.dropped(self.nbytes)

    def cancel_offload(self) -> None:
        """Wanted again before it left: the device bytes are still valid, and the queued copy makes a valid far copy."""
        self.residency = next_residency(self.residency, Move.CANCEL_OFFLOAD)

    def prepare_load(self) -> None:
        """Take the buffer that the next load fills from the current stream's pool."""
        if self._prepared is None:
            backend = self.engine.backend
            stream = backend.current_stream()
            assert self.lease is not None, "a record in far memory has a lease"
            buffer = self.engine.far.allocate(backend, self.lease)
            self._prepared = buffer, backend.record_event(stream), stream
            self.engine.ledger.append(self.nbytes)

    def start_load(self, stream: Stream | None = None) -> None:
        """Queue the copy back into a buffer of the current stream's pool."""
        target = next_residency(self.residency, Move.START_LOAD)
        assert self.lease is not None, "a record in far memory has a lease"
        assert self.out is not None, "a record in far memory was written"
        engine = self.engine
        self.prepare_load()
        assert self._prepared is not None, "just made"
        buffer, allocated, owner = self._prepared
        lane = engine.lanes.back if stream is None else stream
        if not isinstance(self.out, StreamCompletion):  # a host tier orders the lane itself, behind the buffer
            self.out.order(lane)
        try:
            with engine.backend.unseen():
                self.back = engine.far.read(self.lease, buffer, backend=engine.backend, stream=lane, ready=allocated)
            self._prepared = None
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

    @property
    def is_prepared(self) -> bool:
        """Whether the buffer of the next load was taken already."""
        return self._prepared is not None

    def finish_load(self, *, reads: bool = True) -> None:
        """Order the current stream after the load; from here on its kernels may read the bytes.

        ``reads``: false for bytes that are dropped unread. No checksum is asked of those: a source that was changed in place
        while its copy ran is an error only where the bytes are read.
        """
        target = next_residency(self.residency, Move.FINISH_LOAD)
        assert self.back is not None, "a load is in flight"
        if not reads:
            self.back = unchecked(self.back)
        stream = self.engine.backend.current_stream()
        self.back.order(stream)
        self._is_ordered = stream == self.stream
        if not self._is_ordered and stream not in self._foreign_streams:
            self._foreign_streams.append(stream)
        self.residency = target

    @property
    def has_foreign_readers(self) -> bool:
        """Whether another stream than the one whose pool owns the buffer was handed the bytes."""
        return bool(self._foreign_streams)

    def add_reader(self) -> None:
        """Remember a consumer on another stream than the one whose pool owns the buffer (see :meth:`_order_owner`)."""
        stream = self.engine.backend.current_stream()
        if stream != self.stream and stream not in self._foreign_streams:
            if self.back is not None:
                self.back.order(stream)
            self._foreign_streams.append(stream)

    def _order_owner(self) -> None:
        """Nothing queued later on the owner stream may run before every copy and every foreign reader is done."""
        copy = self.out if self.back is None else self.back  # the last one that touches these very bytes
        if copy is not None and not self._is_ordered:
            if copy.__class__ is not StreamCompletion:
                copy = unchecked(copy)
            copy.order(self.stream)
            # The source is the user's: it may come from the pool of another stream than saved it.
            if self.back is None and (stream := self.engine.backend.current_stream()) != self.stream:
                copy.order(stream)
        for reader in self._foreign_streams:
            self.engine.backend.wait_event(self.stream, self.engine.backend.record_event(reader))
        self._foreign_streams = []

    def __del__(self) -> None:
        # Runs on whatever thread drops the last handle, at any point, also inside the engine: it takes no lock.
        if sys.is_finalizing() or not hasattr(self, "is_wanted"):
            return
        self.engine.live.pop(id(self), None)
        try:
            if self.device_bytes is not None:
                # Plain host memory is held by the copy itself, and has no stream-ordered pool to return to.
                if not self.engine.backend.is_host_memory:
                    try:  # noqa: SIM105  # a context manager costs more than all of this
                        self._order_owner()
                    except FarMemoryError:  # a failed copy of bytes that no graph needs any more
                        pass
                self._drop_device_bytes()
            if self._prepared is not None:
                self.engine.ledger.append(-self.nbytes)
            if self.ahead_in is not None:
                self.ahead_in.departed.append(self.nbytes)
        finally:  # an interrupt may land here
            if self.lease is not None:
                self.engine.far.release(self.lease, self.back if self.back is not None else self.out)
