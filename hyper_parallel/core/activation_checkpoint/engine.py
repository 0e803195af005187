"""The schedule of one device: when bytes leave, when our reference is dropped, when they come back.

It never knows modules, policies or tensors' shapes; see ``record`` for one storage's life and ``forecast`` for the order.

Timeline of a step
------------------
::

    forward    op ► pack ► record joins the tail ──(more than tail_bytes behind it)──► record waits for its batch
               the batch is full, a large record comes, the scope or region ends ► its copies out are queued together
               more than window_bytes in flight ► compute is ordered after the oldest copy, our reference is dropped
               end of forward: the tail was never copied at all
    backward   first unpack ► forecast ► loads are queued, in batches, until prefetch_bytes are ahead
               unpack: on the device ► alias │ in flight ► ordered │ far ► loaded now, a miss
               last swapped value dies ► record dies ► its lease returns
    after it   a retained graph: what was loaded is dropped again, the far copy stays valid

Invariants
----------
* The engine's own queues hold records weakly: it never keeps a graph's bytes alive, and the end of a graph needs no call.
* The engine holds at most tail + window + prefetch on the device, and what backward reads right now. Where the user says what
  the device may hold in all, window and prefetch are lower bounds, and free device memory is used up to that limit: early in
  forward copies may lag, and once backward has freed memory loads run far ahead.
* What waits for its batch counts in the window, and is at most a 32nd of it: the bound above holds with batches.
* No call waits for the device: order is said to streams (a file is the exception, its completions block when they must).
* One lock guards queues and moves. Destructors take no lock, so they may run anywhere, also inside it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Protocol

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import Completion, DeviceBackend, FlatBytes, Stream
from hyper_parallel.core.activation_checkpoint.batch import load_together, offload_together
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory
from hyper_parallel.core.activation_checkpoint.far.tier import Refusal
from hyper_parallel.core.activation_checkpoint.forecast import Forecast, Reach, order_by_turns
from hyper_parallel.core.activation_checkpoint.record import Lanes, Position, Record
from hyper_parallel.core.activation_checkpoint.residency import Residency
from hyper_parallel.core.activation_checkpoint.source import Source
from hyper_parallel.core.activation_checkpoint.statistics import Counters, KeepReason
from hyper_parallel.core.activation_checkpoint.timing import LinkClock
from hyper_parallel.core.activation_checkpoint.turns import Turns

__all__ = ["BackwardTask", "Engine"]

_DEFAULT_TAIL_BYTES: Final = 256 * 2**20
_DEFAULT_WINDOW_BYTES: Final = 512 * 2**20
_REFUSED: Final = {Refusal.OVER_LIMIT: KeepReason.OVER_LIMIT, Refusal.NO_SPACE: KeepReason.NO_SPACE}

_MOST_OPEN_TASKS: Final = 32
_FEW_SHARED: Final = 64

_MOST_BATCH_BYTES: Final = 16 * 2**20
_BATCHES_IN_WINDOW: Final = 32  # at least: waiting for a batch must not hold much of what the window may hold
_BATCHES_IN_PREFETCH: Final = 16  # at least: what is wanted next must not wait long for the rest of its batch


def _reaches_nothing(_first: int, _last: int) -> bool:
    """The reach of a backward for which nothing is far."""
    return False


class BackwardTask(Protocol):
    """One backward run, as the framework shows it."""

    key: Hashable
    """Tells it from every other run."""

    def reach(self) -> Reach:
        """Which sequence numbers it will still run. Asked once, when the first record is wanted."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the run is over."""


class Engine:
    """The swap schedule of one device under one set of settings."""

    def __init__(
        self,
        backend: DeviceBackend,
        config: SwapConfig,
        far: FarMemory,
        counters: Counters,
        turns: Turns | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self.far = far
        self.counters = counters
        self.turns = turns or Turns()
        self.clock = LinkClock(backend, counters)
        self.lanes = Lanes(backend)
        self._lock = threading.RLock()
        self._tail: deque[tuple[weakref.ref[Record], int]] = deque()
        self._tail_bytes = 0
        self._in_flight: deque[tuple[weakref.ref[Record], int]] = deque()
        self._in_flight_bytes = 0
        self._batch: list[weakref.ref[Record]] = []  # left the tail; their copies are launched together
        self._batch_bytes = 0
        self._batch_stream: Stream = None
        self.live: set[weakref.ref[Record]] = set()  # a record adds itself, and its destructor takes it out
        self._shared: dict[Hashable, weakref.ref[Record]] = {}  # the newest record by storage and version counter
        self._most_shared = _FEW_SHARED  # with more, those of dead records are forgotten
        self._forecasts: dict[Hashable, Forecast] = {}
        self.ledger: deque[int] = deque()  # what changes the resident bytes without the lock
        self.resident_bytes = 0  # changed under the lock only
        self._launches = 0
        self._tail_limit = _DEFAULT_TAIL_BYTES if config.tail_bytes is None else config.tail_bytes
        self._window_limit = _DEFAULT_WINDOW_BYTES if config.window_bytes is None else config.window_bytes
        self._batch_limit = min(_MOST_BATCH_BYTES, self._window_limit // _BATCHES_IN_WINDOW)

    # ------------------------------------------------------------------ forward

    def find(self, source: Source) -> Record | None:
        """The living record of this storage at this version, if one was made: its copy serves again.

        The same version on another counter says nothing of the bytes: ``share_key`` names both.
        """
        shared = self._shared.get(source.share_key)
        record = None if shared is None else shared()
        if record is None or record.source is None:
            return None
        return record if record.source.version == source.version and record.source.is_alive() else None

    def admit(
        self,
        device_bytes: FlatBytes,
        nbytes: int,
        *,
        position: Position,
        index: int = 0,
        group: object | None = None,
        tag: str | None = None,
        stays: bool = False,
        source: Source | None = None,
        is_in_region: bool = False,
    ) -> Record:
        """A new record for bytes that were just saved; it is copied out when enough newer ones follow it.

        ``is_in_region``: a replayed region is open, and calls :meth:`trim_window` when it closes. The limit of the
        device is checked then: in the middle of a layer its temporary values are counted too, and they are freed without us.
        """
        record = Record(
            self, device_bytes, nbytes, position=position, index=index, group=group, tag=tag, stays=stays, source=source
        )
        with self._lock:
            self._add_pass(record)
            self.resident_bytes += nbytes
            if source is not None:
                if len(self._shared) > self._most_shared:
                    self._shared = {key: old for key, old in self._shared.items() if old() is not None}
                    self._most_shared = _FEW_SHARED + 2 * len(self._shared)
                self._shared[source.share_key] = record.reference
            if not stays:
                self._queue(record, trims_window=not is_in_region)
            if self.ledger or self.resident_bytes > self.counters.peak_resident_bytes:
                self._account()
        return record

    def share(self, record: Record) -> None:
        """Count a save that an existing record serves."""
        record.shares += 1
        self._add_pass(record)
        self.counters.add("shared_copies", 1)
        self.counters.add("shared_bytes", record.nbytes)

    def _add_pass(self, record: Record) -> None:
        """The record is needed by the pass whose forward runs now, where a schedule says which that is."""
        key = self.turns.packing
        if key is not None and key not in record.passes:
            record.passes = (*record.passes, key)

    def enqueue(self, record: Record) -> None:
        """Let a record leave that stayed so far."""
        with self._lock:
            self._queue(record, trims_window=True)

    def _queue(self, record: Record, *, trims_window: bool) -> None:
        self._tail.append((record.reference, record.nbytes))
        self._tail_bytes += record.nbytes
        launches = self._launches
        while self._tail_bytes > self._tail_limit:
            reference, nbytes = self._tail.popleft()
            self._tail_bytes -= nbytes
            oldest = reference()
            if oldest is not None and not oldest.stays and not oldest.is_protected:
                self._join_batch(oldest)
        if trims_window or self.config.device_bytes is None:
            looks_at_copies = self._launches != launches
            if looks_at_copies or self._in_flight_bytes + self._batch_bytes > self._window_limit:
                self._trim_to_window(looks_at_copies=looks_at_copies)

    def _join_batch(self, record: Record) -> None:
        """The record's copy is launched with the next ones of its stream; a large one is launched now."""
        is_large = record.nbytes >= self._batch_limit
        if is_large or (self._batch and record.stream != self._batch_stream):
            self._launch_batch()
        if is_large:
            self._launch_offload(record)
            return
        self._batch.append(record.reference)
        self._batch_bytes += record.nbytes
        self._batch_stream = record.stream
        if self._batch_bytes >= self._batch_limit:
            self._launch_batch()

    def _launch_batch(self) -> None:
        """Launch the copies out of the records that wait for it, together where their leases allow it."""
        if not self._batch:
            return
        references, self._batch, self._batch_bytes = self._batch, [], 0
        leaving = [
            record
            for reference in references
            if (record := reference()) is not None and not record.stays and not record.is_protected
        ]
        with self.backend.unseen():
            leaving = [record for record in leaving if self._may_leave(record)]
            self._reserve_together([record for record in leaving if record.lease is None])
            tier = self.far.together
            together = [
                record
                for record in leaving
                if (record.out is None and record.lease is not None and record.lease.tier is tier)
                or self._takes_lease(record)
            ]
            if together:
                completion = offload_together(together, self.lanes.out)
                self._launched(together, completion, sum([record.nbytes for record in together]))

    def _reserve_together(self, records: Sequence[Record]) -> None:
        """Leases for the first ones, as many as there are without a question to the host; the others ask one by one."""
        leases = self.far.reserve_together(self.backend, [record.nbytes for record in records])
        for record, lease in zip(records, leases):
            record.lease = lease

    def _takes_lease(self, record: Record) -> bool:
        """Whether the record moves with its batch, with a lease of its own. Otherwise it stays, or is launched here."""
        if record.out is None:
            refusal = record.reserve()
            if refusal is not None:
                self.counters.keep(_REFUSED[refusal], record.nbytes)
                return False
            assert record.lease is not None, "just taken"
            if record.lease.tier is self.far.together:
                return True
        self._launch_offload(record)
        return False

    def launch_batch(self, *, trims_window: bool) -> None:
        """Launch the copies that wait for their batch: the scope that saved their values has ended."""
        if self._batch:
            with self._lock:
                self._launch_batch()
                if trims_window or self.config.device_bytes is None:
                    self._trim_to_window()

    def _may_leave(self, record: Record) -> bool:
        if record.residency is not Residency.DEVICE or record.is_wanted:
            return False
        # Bytes that are no longer the saved ones will never be handed out.
        return record.source is None or record.back is not None or record.source.is_unchanged()

    def _launch_offload(self, record: Record, stream: Stream | None = None) -> None:
        if not self._may_leave(record):
            return
        had_copy = record.has_far_copy
        refusal = record.start_offload(stream)
        if refusal is not None:
            self.counters.keep(_REFUSED[refusal], record.nbytes)
            return
        self._launched((record,), None if had_copy else record.out, record.nbytes)

    def _launched(self, records: Sequence[Record], copy: Completion | None, nbytes: int) -> None:
        """Count records that are in flight from now on. ``copy`` is None where a far copy existed before."""
        trace = self.counters.trace
        for record in records:
            if trace is not None:
                trace("offload", record)
            if copy is not None and record.tag is not None:
                self.counters.add_to("bytes_by_tag", record.tag, record.nbytes)
        self._in_flight.extend([(record.reference, record.nbytes) for record in records])
        self._launches += 1
        self._in_flight_bytes += nbytes
        if copy is not None:
            self.counters.add("swapped_out_bytes", nbytes)
            self.clock.copied(copy, nbytes, is_out=True)

    def _trim_to_window(self, *, looks_at_copies: bool = True) -> None:
        """Past the window, order compute after the oldest copy and drop its source. Sources of finished copies are dropped too.

        Without ``looks_at_copies`` nothing is asked of the device while the window is not full.
        """
        stream: Stream = None
        while self._in_flight:
            reference, nbytes = self._in_flight[0]
            record = reference()
            if record is not None and record.residency is Residency.D2H:
                assert record.out is not None, "a record in flight has a copy"
                if self._in_flight_bytes + self._batch_bytes <= self._window_limit:
                    if not looks_at_copies or not record.out.is_done():
                        return
                elif self.config.device_bytes is not None and not record.out.is_done() and self._has_spare_memory():
                    return
                if stream is None:
                    stream = self.backend.current_stream()
                self._drop(record, record.out, stream)
            self._in_flight.popleft()
            self._in_flight_bytes -= nbytes

    def _drop(self, record: Record, copy: Completion, stream: Stream = None) -> None:
        """Order compute after the copy out of a record, and let go of its device bytes."""
        if not copy.is_ordered_before(record.stream):
            self.clock.stalled(copy)
        record.finish_offload(stream)
        if self.counters.trace is not None:
            self.counters.trace("drop", record)

    def _has_spare_memory(self, nbytes: int = 0) -> bool:
        """Whether the device would hold less than the user allows, with ``nbytes`` more on it."""
        limit = self.config.device_bytes
        if limit is None:
            return False
        held = self.backend.held_bytes()
        return held is not None and held + nbytes <= limit

    def trim_window(self) -> None:
        """Check the window again: memory held by others (saved values, the end of a layer) may have grown."""
        if self._batch or self._in_flight_bytes > self._window_limit:
            with self._lock:
                self._launch_batch()
                self._trim_to_window()

    def launch_offload(self, record: Record, *, stream: Stream | None = None) -> None:
        """Queue the copy out now, whatever the tail says."""
        with self._lock:
            self._launch_offload(record, stream)
            self._trim_to_window()

    def finish_offload(self, record: Record) -> None:
        """Let go of the device bytes of a record whose copy was queued; compute is ordered after the copy."""
        with self._lock:
            if record.residency is Residency.D2H:
                assert record.out is not None, "a record in flight has a copy"
                self._drop(record, record.out)

    def finish_copy_before_write(self, record: Record) -> bool:
        """An op is about to change the source bytes: order it after the copy out. False when there is no copy."""
        with self._lock:
            if record.residency is Residency.DEVICE:
                self._launch_offload(record)
            if record.residency is Residency.D2H:
                record.finish_offload()
                if self.counters.trace is not None:
                    self.counters.trace("drop", record)
            return record.residency is not Residency.DEVICE

    # ------------------------------------------------------------------ backward

    def fetch(self, record: Record, task: BackwardTask | None) -> FlatBytes:
        """The device bytes of ``record``, ordered for the current stream. Also launches the next loads."""
        with self._lock:
            forecast = None if task is None else self._forecasts.get(task.key) or self._begin_forecast(task)
            is_first_use = not record.is_wanted
            record.is_wanted = task is not None
            self._make_readable(record, is_first_use=is_first_use)
            device_bytes = record.device_bytes
            if forecast is None:
                self._trim_to_window()
            else:
                ahead_in = record.ahead_in
                if ahead_in is not None:
                    ahead_in.asked(record)
                if ahead_in is not forecast:
                    forecast.touch(record)
                least_bytes = self.config.prefetch_bytes
                if least_bytes is None:
                    least_bytes = self.clock.prefetch_bytes
                self._run_ahead(forecast, record.group, least_bytes=least_bytes)
            if self.ledger or self.resident_bytes > self.counters.peak_resident_bytes:
                self._account()
        return device_bytes

    def start_prefetch(self, task: BackwardTask, *, is_near: bool = True) -> None:
        """A replay begins: start its loads before the first value is asked for.

        Where none of its values is ours (not ``is_near``), loads for later ones take free memory only.
        """
        if not is_near and (self.config.device_bytes is None or not self.live):
            return
        with self._lock:
            forecast = self._forecasts.get(task.key) or self._begin_forecast(task)
            self._run_ahead(forecast, None, least_bytes=self.prefetch_bytes if is_near else 0)
            self._account()

    def _begin_forecast(self, task: BackwardTask) -> Forecast:
        """A new backward."""
        forecast = self._forecasts[task.key] = self._new_forecast(task)
        task.at_end(functools.partial(self.end_of_task, task.key))
        if len(self._forecasts) > _MOST_OPEN_TASKS:
            # A backward that raised never reports its end.
            self.end_of_task(next(iter(self._forecasts)))
        return forecast

    def _new_forecast(self, task: BackwardTask | None) -> Forecast:
        """What the backward that runs will need, and after it what the backwards to come will, where a schedule knows them."""
        live = self.live_records()
        far = [record for record in live if record.residency in (Residency.HOST, Residency.D2H)]
        if not self.turns.is_known:
            return Forecast(far, task.reach() if far and task is not None else _reaches_nothing)
        # What an earlier backward had loaded ahead and did not ask for counts where it comes in the order.
        is_open = self._forecasts.values()
        here = [record for record in live if record.ahead_in is not None and record.ahead_in not in is_open]
        for record in here:
            if record.ahead_in is not None:
                record.ahead_in.asked(record)
        later = order_by_turns((*far, *here), self.turns)
        rest = [record for record in far if not record.passes] if later else far
        reach = task.reach() if rest and task is not None else _reaches_nothing
        return Forecast(rest, reach, later)

    def prefetch_next_turn(self, *, is_whole: bool) -> None:
        """The next backward of a known schedule is near: its loads begin before its first value is asked for.

        ``is_whole``: everything that this turn needs is loaded at once. Of a backward in two halves the second one runs as
        many small backwards, in an order that is not known.
        """
        with self._lock:
            least_bytes = self.prefetch_bytes
            if is_whole:
                needed = [record for record in self.live_records() if self.turns.is_now(record.passes)]
                least_bytes = max(least_bytes, sum(record.nbytes for record in needed))
            self._run_ahead(self._new_forecast(None), None, least_bytes=least_bytes)
            self._account()

    def _make_readable(self, record: Record, *, is_first_use: bool) -> None:
        if record.residency is Residency.D2H:
            record.cancel_offload()
        elif record.residency is Residency.HOST:
            self.counters.add("misses", 1)
            if self.counters.trace is not None:
                self.counters.trace("miss", record)
            self._start_load(record)
        elif record.residency is Residency.H2D:
            with self.counters.lock:
                self.counters.prefetch_hits += 1
        elif is_first_use and not record.has_far_copy:
            self.counters.keep(_why_it_stayed(record), record.nbytes)
        if record.residency is Residency.H2D:
            assert record.back is not None, "a load is in flight"
            if not record.back.is_ordered_before(record.stream):
                self.clock.stalled(record.back, is_load=True)
            record.finish_load()
        else:
            record.add_reader()
        if self.counters.trace is not None:
            self.counters.trace("use", record)

    def _start_load(self, record: Record, stream: Stream | None = None) -> None:
        try:
            record.start_load(stream)
        except Exception as error:
            if not self.backend.is_out_of_memory(error) or not self._give_back_ahead():
                raise
            record.start_load(stream)
        self._loaded((record,), record.back)

    def _loaded(self, records: Sequence[Record], copy: Completion | None) -> None:
        nbytes = sum([record.nbytes for record in records])
        self.counters.add("swapped_in_bytes", nbytes)
        self.clock.copied(copy, nbytes, is_out=False)
        if self.counters.trace is not None:
            for record in records:
                self.counters.trace("load", record)

    def _run_ahead(self, forecast: Forecast, group: object | None, *, least_bytes: int) -> None:
        """Keep what backward needs next and has not left yet; then drop copied sources, and launch loads."""
        if forecast.upcoming() is None:
            self._trim_to_window()
            return
        here = forecast.ahead_bytes()
        if self._in_flight:
            self._keep_wanted_soon(forecast, here, least_bytes=least_bytes)
            self._trim_to_window()
        limit = least_bytes // _BATCHES_IN_PREFETCH
        if limit > _MOST_BATCH_BYTES:
            limit = _MOST_BATCH_BYTES
        if here + limit <= least_bytes or group is not None or self.config.device_bytes is not None:
            self._prefetch(forecast, group, here, least_bytes=least_bytes, limit=limit)

    def _keep_wanted_soon(self, forecast: Forecast, soon: int, *, least_bytes: int) -> None:
        """Keep what backward needs within ``least_bytes`` and has not left yet; ``soon`` are ahead already.

        What is kept counts as ahead when the forecast's head comes to it: until then it must not hold up nearer loads.
        """
        for record in forecast.next_ones():
            if soon >= least_bytes:
                break
            if record.residency is Residency.D2H:
                record.cancel_offload()
                soon += record.nbytes
            elif record.residency is Residency.HOST or record.ahead_in is None:
                soon += record.nbytes

    def _prefetch(self, forecast: Forecast, group: object | None, ahead: int, *, least_bytes: int, limit: int) -> None:
        """Load what is wanted next, in batches, until ``least_bytes`` are ahead. The last batch waits until it is whole."""
        forced = () if group is None else (group, getattr(group, "before", None) or group)
        batch: list[Record] = []
        batch_bytes = 0
        while (record := forecast.upcoming()) is not None:
            is_enough = ahead >= least_bytes and record.group not in forced
            if is_enough and not self._has_spare_memory(batch_bytes + record.nbytes):
                break
            if record.residency is Residency.D2H:
                # Wanted soon: what is still here need not go and come back.
                record.cancel_offload()
            if record.residency in (Residency.DEVICE, Residency.H2D) and record.ahead_in is None:
                forecast.loaded(record)
                ahead += record.nbytes
            elif record.residency is Residency.HOST:
                batch.append(record)
                batch_bytes += record.nbytes
                ahead += record.nbytes
            forecast.advance()
            if batch_bytes and batch_bytes >= limit:
                if not self._load_ahead(forecast, batch):
                    return
                batch, batch_bytes = [], 0
        self._load_ahead(forecast, batch)

    def _load_ahead(self, forecast: Forecast, records: list[Record]) -> bool:
        """Load records that were taken from the forecast. False where the device is full: the rest goes back to it."""
        while records:
            first = records[0]
            loaded: Sequence[Record] = records[: self._count_together(records)]
            try:
                if len(loaded) > 1:
                    loaded, copy = load_together(loaded, self.lanes.back)
                else:
                    first.start_load()
                    assert first.back is not None, "just queued"
                    copy = first.back
            except Exception as error:
                forecast.put_back(records)
                if self.backend.is_out_of_memory(error):
                    return False  # no memory to run ahead; the value is loaded when it is asked for
                raise
            self._loaded(loaded, copy)
            for record in loaded:
                forecast.loaded(record)
            records = records[len(loaded) :]
        return True

    def _count_together(self, records: Sequence[Record]) -> int:
        """How many of the first records are loaded by one launch."""
        tier = self.far.together
        for count, record in enumerate(records):
            if record.lease is None or record.lease.tier is not tier or record.prepared is not None:
                return max(1, count)
        return len(records)

    def _give_back_ahead(self) -> bool:
        """The device is full: drop what was loaded ahead and not asked for. True when anything was dropped."""
        given = False
        for forecast in self._forecasts.values():
            for record in forecast.ahead():
                given |= self._drop_copied_bytes(record)
        return given

    def drop_after_replay(self, record: Record) -> None:
        """A replay has taken what it needs: drop our own reference, unless another save uses this record."""
        with self._lock:
            # A reader on a foreign stream goes on after the replay, and only this record orders the buffer's pool after it.
            if not record.shares and not record.has_foreign_readers and record.residency is Residency.DEVICE:
                self._drop_copied_bytes(record)

    def _drop_copied_bytes(self, record: Record) -> bool:
        """Drop device bytes that also exist in far memory."""
        if record.residency is Residency.H2D:
            record.finish_load(reads=False)
        if record.residency is not Residency.DEVICE or not record.has_far_copy:
            return False
        refusal = record.start_offload()
        assert refusal is None, "a record with a far copy needs no new lease"
        record.finish_offload()
        return True

    def launch_load(self, record: Record, *, stream: Stream | None = None) -> None:
        """Queue the copy back now, whatever the forecast says."""
        with self._lock:
            if record.residency is Residency.HOST:
                self._start_load(record, stream)

    def finish_load(self, record: Record) -> None:
        """Order the current stream after a queued load."""
        with self._lock:
            if record.residency is Residency.H2D:
                assert record.back is not None, "a load is in flight"
                self.clock.stalled(record.back, is_load=True)
                record.finish_load()
            elif record.residency is Residency.D2H:
                record.cancel_offload()

    def end_of_task(self, key: Hashable) -> None:
        """Backward ended: drop what it loaded and a retained graph still holds."""
        with self._lock:
            forecast = self._forecasts.pop(key, None)
            if forecast is None:
                return
            for record in forecast.touched():
                record.is_wanted = False
                if (
                    not record.passes or self.turns.next_of(record.passes) is None
                ):  # else it is needed again, or dies with the graph
                    self._drop_copied_bytes(record)
            self._trim_to_window()
            self.clock.read_finished()

    def _account(self) -> None:
        """Fold what records gained and lost, in any thread, into the resident bytes and their peak."""
        while self.ledger:
            self.resident_bytes += self.ledger.popleft()
        if self.resident_bytes > self.counters.peak_resident_bytes:
            self.counters.peak_resident_bytes = self.resident_bytes

    # ------------------------------------------------------------------ looking at it

    @property
    def prefetch_bytes(self) -> int:
        """How far ahead loads run: the setting, else what the measured link loads in the time by which loads were late."""
        if self.config.prefetch_bytes is not None:
            return self.config.prefetch_bytes
        return self.clock.prefetch_bytes

    def live_records(self) -> list[Record]:
        """The records that some graph still holds."""
        return [record for reference in list(self.live) if (record := reference()) is not None]

    @property
    def in_flight_bytes(self) -> int:
        """Bytes whose copy out was queued and whose source is still held."""
        return self._in_flight_bytes


def _why_it_stayed(record: Record) -> str:
    if record.is_protected:
        return KeepReason.PROTECTED
    return KeepReason.LAST_GROUP if record.stays and record.group is not None else KeepReason.TAIL
