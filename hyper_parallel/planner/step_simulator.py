"""Simulates one step: the host, compute, the link out, the link back, and every byte on the device.

It mirrors the engine. Memory follows the order in which the host issues work, because that is how a stream-ordered
allocator counts it; time follows the device. So the end of a copy frees nothing yet: bytes go when the window forces the
oldest copy out, and then compute waits for that copy.

Rules
-----
1. A swapped value joins the tail when it is packed. It is copied once more than ``tail_bytes`` stand in the tail; the copy
   may start as soon as the value existed.
2. Past ``window_bytes`` in flight, compute waits for the oldest copy and its bytes go (unless a local reader still holds
   them).
3. The first value that backward asks for makes the forecast: what is far, or on its way, in the order of want. Whenever a
   value is asked for, loads are started until ``prefetch_bytes`` are ahead. A load starts when compute gets there.
4. What was still on its way out when it is wanted again is not loaded; what is in the tail never left.
5. When a region's replay is over our own references go. A copy out that was called off (rule 4) must end before that, so
   compute waits for it.
6. Over the host's cap a value goes to disk, over the disk's cap it stays on the device.
7. The host issues everything in order and waits for nothing. Work and copies start when they are issued, at the earliest, and
   work ends no sooner than its last op was issued.
8. The peak is the highest moment's. Bytes that corrections give a moment are there for as long as it lasts.
9. Where the processor that computes makes the copies too (a host and its disk), each copy also takes compute's own time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Final

from hyper_parallel.planner.block_trace import (
    ADMIT,
    BASE,
    END,
    FETCH,
    FREE,
    GRADIENTS,
    HEAD,
    LET_GO,
    PARTS,
    PREFETCH,
    RELEASE,
    RUN,
    SWAP,
    UNEXPLAINED,
    WORK,
    BlockTrace,
    Choice,
    KindAnalysis,
    TraceEvent,
    make_block_trace,
)
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.profile import EngineSettings, Profile, Segment
from hyper_parallel.planner.simulated_copies import (
    CANCELLED,
    COMING,
    FAR,
    GONE,
    LEAVING,
    ON_DEVICE,
    STUCK,
    TAIL,
    Lane,
    SimulatedRecord,
)
from hyper_parallel.records.moments import MomentBytes

__all__ = ["ExplainedSimulation", "SimulatedStep", "Simulation", "StepSimulator"]

_MAKING: Final = 12  # making an event costs this many times what simulating it costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What one simulated step comes to."""

    peak_bytes: int
    peak_where: str
    peak_parts: tuple[int, ...]  # by block_trace.PARTS; empty unless explained
    moments: MomentBytes  # the peak of each moment
    step_seconds: float
    compute_seconds: float
    replay_seconds: float
    exposed_seconds: float
    host_seconds: float
    out_bytes: int
    in_bytes: int
    swapped_values: int
    host_bytes: int
    disk_bytes: int

    def named_parts(self) -> dict[str, int]:
        """The peak by what it is made of."""
        return {name: nbytes for name, nbytes in zip(PARTS, self.peak_parts) if nbytes}


class StepSimulator:
    """Simulates steps of one profile; the traces of blocks are kept between steps."""

    def __init__(self, profile: Profile, corrections: Corrections | None = None) -> None:
        self.profile = profile
        self.corrections = corrections or Corrections()
        self.analyses = [KindAnalysis(kind) for kind in profile.kinds]
        self.simulations = 0
        self.cost = 0  # events simulated, and what making traces costs in events
        self._traces: dict[tuple[int, Choice, int], BlockTrace] = {}

    def corrected(self, corrections: Corrections) -> StepSimulator:
        """The same profile with other corrections; the traces of blocks are shared."""
        other = copy.copy(self)
        other.corrections = corrections
        return other

    def trace(self, block: int, choice: Choice) -> BlockTrace:
        """The trace of block number ``block`` with ``choice``."""
        row = self.profile.blocks[block]
        key = row.kind, choice, row.input_bytes
        trace = self._traces.get(key)
        if trace is None:
            min_bytes = self.profile.engine.min_bytes
            trace = make_block_trace(
                self.analyses[row.kind],
                choice,
                input_bytes=row.input_bytes,
                min_bytes=min_bytes,
                host=self.profile.host,
            )
            self._traces[key] = trace
            self.cost += _MAKING * trace.events
        return trace

    def simulate(self, choices: Sequence[Choice], settings: EngineSettings) -> SimulatedStep:
        """One step with one choice per block. What the peak is made of is left out: see :meth:`explain`."""
        self.simulations += 1
        traces = [self.trace(block, choice) for block, choice in enumerate(choices)]
        self.cost += sum(trace.events for trace in traces)
        return Simulation(self, traces, settings).run()

    def explain(self, choices: Sequence[Choice], settings: EngineSettings) -> SimulatedStep:
        """The same step, with the peak by its parts."""
        traces = [self.trace(block, choice) for block, choice in enumerate(choices)]
        return ExplainedSimulation(self, traces, settings).run()


class Simulation:
    """One step while it is simulated: the clock, the bytes and the records."""

    def __init__(self, simulator: StepSimulator, traces: list[BlockTrace], settings: EngineSettings) -> None:
        profile = simulator.profile
        self.profile = profile
        self.corrections = corrections = simulator.corrections
        self.scale = corrections.work_scale
        self.issue_scale = corrections.issue_scale
        self.region_scale = corrections.region_scale
        self.swap_scale = corrections.swap_scale
        self.traces = traces
        self.settings = settings
        self.now = 0.0  # of the device's compute
        self.host = 0.0  # when the host has issued everything so far
        self.host_waits = 0.0  # of the device, for the host
        self.live = profile.base.total
        self.peak = 0  # of this moment, so far
        self.peak_where: tuple[str, int] = ("forward", -1)
        self.moments: list[int] = []  # the peaks of those that are over
        self.highest_where = self.peak_where
        self.gradients = 0
        self.records: list[list[SimulatedRecord]] = []
        self.tail: deque[SimulatedRecord] = deque()
        self.tail_bytes = 0
        self.leaving: deque[SimulatedRecord] = deque()
        self.leaving_bytes = 0
        slower = corrections.link_scale
        self.lanes = [Lane(profile.link, profile.far.host_bytes, slower)]
        if profile.far.disk_link is not None:
            self.lanes.append(Lane(profile.far.disk_link, profile.far.disk_bytes, slower))
        self.forecast: list[SimulatedRecord] | None = None
        self.next_load = 0
        self.ahead = 0
        self.out_bytes = self.in_bytes = self.moved_values = 0

    def _add_bytes(self, part: int, nbytes: int) -> None:
        self.live += nbytes

    def _check_peak(self, phase: str, block: int, extra: int = 0, part: int = WORK) -> None:
        """A moment that may be the peak, with ``extra`` bytes of ``part``."""
        if self.live + extra > self.peak:
            self.peak = self.live + extra
            self.peak_where = (phase, block)

    def _run(self, event: TraceEvent, block: int) -> None:
        """Work, and bytes that come and go with it."""
        _, _, seconds, peak, net, _, _, phase, host_seconds, region_seconds = event
        if self.live + peak > self.peak:
            self.peak = self.live + peak
            self.peak_where = (phase, block)
        self.live += net
        compute = seconds * self.scale
        end = self.now + compute
        if host_seconds or region_seconds:  # rule 7
            start = self.host
            self.host = start + host_seconds * self.issue_scale + region_seconds * self.region_scale
            end = max(end, start + compute, self.host)
            self.host_waits += end - self.now - compute
        self.now = end

    def _rename_bytes(self, source: int, target: int, nbytes: int) -> None:
        """Bytes that stay on the device are counted under another part from now on."""

    # ------------------------------------------------------------------ the step

    def run(self) -> SimulatedStep:
        """Forward, backward, and the sum."""
        prologue, epilogue = self.profile.prologue, self.profile.epilogue
        last, more = len(self.traces), self.corrections.moments
        self._begin_moment(more.prologue_forward)
        self._segment_forward(prologue, -1)
        self._end_moment(more.prologue_forward)
        self._begin_moment(more.blocks_forward)
        for block, trace in enumerate(self.traces):
            self.records.append([])
            self._forward(block, trace)
        self._end_moment(more.blocks_forward)
        self._begin_moment(more.head_and_loss)
        self._segment_forward(epilogue, last)
        self._segment_backward(epilogue, last)
        self._end_moment(more.head_and_loss)
        self._begin_moment(more.blocks_backward)
        for block in reversed(range(last)):
            self._backward(block, self.traces[block])
        self._end_moment(more.blocks_backward)
        self._begin_moment(more.prologue_backward)
        self._segment_backward(prologue, -1)
        self._end_moment(more.prologue_backward)
        return self._result()

    def _begin_moment(self, unexplained: int) -> None:  # rule 8
        self._add_bytes(UNEXPLAINED, unexplained)
        self.peak = 0

    def _end_moment(self, unexplained: int) -> None:
        self._add_bytes(UNEXPLAINED, -unexplained)
        if self.peak > max(self.moments, default=0):
            self._keep_highest()
        self.moments.append(self.peak)

    def _keep_highest(self) -> None:
        """This moment is the highest so far."""
        self.highest_where = self.peak_where

    def _segment_forward(self, segment: Segment, block: int) -> None:
        transient = segment.forward_transient_bytes
        self._check_peak("forward", block, max(transient, segment.kept_bytes), HEAD)
        self._add_bytes(HEAD, segment.kept_bytes)
        self.now += segment.forward_seconds * self.scale

    def _segment_backward(self, segment: Segment, block: int) -> None:
        self._add_bytes(GRADIENTS, segment.gradient_bytes)
        self.gradients += segment.gradient_bytes
        self._check_peak("backward", block, segment.backward_transient_bytes, HEAD)
        self._add_bytes(HEAD, -segment.kept_bytes)
        self.now += segment.backward_seconds * self.scale

    def _forward(self, block: int, trace: BlockTrace) -> None:
        records = self.records[block]
        run, sizes = self._run, trace.records
        for event in trace.forward:
            what = event[0]
            if what == RUN:
                run(event, block)
            elif what == ADMIT:
                self.host += event.host_seconds * self.swap_scale
                self._admit(sizes[event[1]], records)
            else:
                assert what == RELEASE, "nothing else happens in forward"
                self._release(records[event[1]])

    def _admit(self, nbytes: int, records: list[SimulatedRecord]) -> None:
        """Rule 1."""
        record = SimulatedRecord(nbytes, self.now)
        records.append(record)
        self._rename_bytes(WORK, SWAP, nbytes)
        self.tail.append(record)
        self.tail_bytes += nbytes
        while self.tail_bytes > self.settings.tail_bytes:
            oldest = self.tail.popleft()
            self.tail_bytes -= oldest.nbytes
            if oldest.state == TAIL and not oldest.is_wanted:  # of another micro-batch: its backward may be over
                self._launch(oldest)
        while self.leaving and (self.leaving_bytes > self.settings.window_bytes or self.leaving[0].state != LEAVING):
            self._drop_oldest()

    def _launch(self, record: SimulatedRecord) -> None:
        """Rule 6, and the copy out."""
        for lane in self.lanes:
            if lane.used + record.nbytes <= lane.cap:
                break
        else:
            record.state = STUCK
            return
        lane.used += record.nbytes
        self.now += record.nbytes * lane.compute_seconds  # rule 9
        start = max(lane.out_free, record.ready, self.host)
        lane.out_free = record.out_end = start + lane.copy_seconds + record.nbytes * lane.out_seconds
        record.far = lane
        record.state = LEAVING
        self.out_bytes += record.nbytes
        self.moved_values += 1
        self.leaving.append(record)
        self.leaving_bytes += record.nbytes

    def _drop_oldest(self) -> None:
        """Rule 2."""
        record = self.leaving.popleft()
        self.leaving_bytes -= record.nbytes
        if record.state != LEAVING:
            return
        self.now = max(self.now, record.out_end)
        record.state = FAR
        if not record.is_read_locally:
            self._add_bytes(SWAP, -record.nbytes)

    def _release(self, record: SimulatedRecord) -> None:
        record.is_read_locally = False
        if record.state == FAR:
            self._add_bytes(SWAP, -record.nbytes)

    def _backward(self, block: int, trace: BlockTrace) -> None:
        records = self.records[block]
        run = self._run
        self.gradients += self.profile.kind_of(block).gradient_bytes
        for event in trace.backward:
            what = event[0]
            if what == RUN:
                run(event, block)
            elif what == FETCH:
                self.host += event.host_seconds * self.swap_scale
                self._fetch(records[event[1]])
                self._check_peak(event.phase, block)
            elif what == LET_GO:
                self._let_go(records[event[1]])
            elif what == FREE:
                self._free(records[event[1]])
            elif what == END:
                self._end(records[event[1]])
            else:
                assert what == PREFETCH, "nothing else happens in backward"
                self._prefetch()
                self._check_peak(event.phase, block)

    def _fetch(self, record: SimulatedRecord) -> None:
        """Rule 3: the value itself first, then what comes next."""
        if self.forecast is None:
            self._make_forecast()
        record.is_wanted = True
        if record.state == LEAVING:
            record.state = CANCELLED
        elif record.state == FAR:
            self._load(record)
            self.now = max(self.now, record.in_end)
        elif record.state == COMING:
            self.now = max(self.now, record.in_end)
        self._not_ahead(record)
        self._prefetch()

    def _not_ahead(self, record: SimulatedRecord) -> None:
        if record.is_ahead:
            record.is_ahead = False
            self.ahead -= record.nbytes

    def _count_ahead(self, record: SimulatedRecord) -> None:
        record.is_ahead = True
        self.ahead += record.nbytes

    def _make_forecast(self) -> None:
        self.forecast = [
            self.records[block][record]
            for block in reversed(range(len(self.traces)))
            for record in self.traces[block].wanted
            if self.records[block][record].state in (LEAVING, FAR)
        ]

    def _prefetch(self) -> None:
        if self.forecast is None:
            self._make_forecast()
        assert self.forecast is not None, "just made"
        while self.next_load < len(self.forecast):
            record = self.forecast[self.next_load]
            if not record.is_wanted:
                if self.ahead >= self.settings.prefetch_bytes:
                    return
                if record.state == LEAVING:  # rule 4
                    record.state = CANCELLED
                elif record.state == FAR:
                    self._load(record)
                if record.state in (CANCELLED, COMING) and not record.is_ahead:
                    self._count_ahead(record)
            self.next_load += 1

    def _load(self, record: SimulatedRecord) -> None:
        lane = record.far
        assert lane is not None, "a far record has a lane"
        self.now += record.nbytes * lane.compute_seconds  # rule 9
        start = max(lane.in_free, self.now, self.host, record.out_end)
        lane.in_free = record.in_end = start + lane.copy_seconds + record.nbytes * lane.in_seconds
        record.state = COMING
        self.in_bytes += record.nbytes
        self._add_bytes(SWAP, record.nbytes)

    def _let_go(self, record: SimulatedRecord) -> None:
        """Rule 5: a copy out that was called off is waited for."""
        if record.state == CANCELLED:
            self.now = max(self.now, record.out_end)

    def _free(self, record: SimulatedRecord) -> None:
        """Nothing needs it any more; what has no far copy stays to the region's end."""
        if record.state in (COMING, CANCELLED):
            self._let_go(record)
            self._add_bytes(SWAP, -record.nbytes)
            record.state = GONE

    def _end(self, record: SimulatedRecord) -> None:
        self._not_ahead(record)  # nothing read it
        record.is_wanted = True  # from here the forecast passes over it
        if record.state in ON_DEVICE:
            if record.far is not None:
                self.now = max(self.now, record.out_end)
            self._add_bytes(SWAP, -record.nbytes)
        record.state = GONE

    # ------------------------------------------------------------------ the sum

    def _result(self) -> SimulatedStep:
        assert self.live == self.profile.base.total + self.gradients, "every byte of the step is returned"
        compute, replay = self._busy_seconds()
        busy = compute + replay + self.host_waits
        exposed = max(0.0, self.now - busy) * self.corrections.stall_cost
        return SimulatedStep(
            peak_bytes=max(self.moments),
            moments=MomentBytes.of(self.moments),
            peak_where=self._where(),
            peak_parts=self._parts_at_peak(),
            step_seconds=busy + exposed,
            compute_seconds=compute,
            replay_seconds=replay,
            exposed_seconds=exposed,
            host_seconds=self.host,
            out_bytes=self.out_bytes,
            in_bytes=self.in_bytes,
            swapped_values=self.moved_values,
            host_bytes=self.lanes[0].used,
            disk_bytes=self.lanes[1].used if len(self.lanes) > 1 else 0,
        )

    def _busy_seconds(self) -> tuple[float, float]:
        """What the device computes, and what it runs again."""
        segments = (self.profile.prologue, self.profile.epilogue)
        compute = sum(trace.compute_seconds for trace in self.traces)
        compute += sum(segment.forward_seconds + segment.backward_seconds for segment in segments)
        return compute * self.scale, sum(trace.replay_seconds for trace in self.traces) * self.scale

    def _parts_at_peak(self) -> tuple[int, ...]:
        return ()

    def _where(self) -> str:
        phase, block = self.highest_where
        if block < 0:
            return f"{phase} of the prologue"
        if block == len(self.traces):
            return f"{phase} of the head and loss"
        return f"{phase} of {self.profile.blocks[block].name}"


class ExplainedSimulation(Simulation):
    """The same, which also counts for every part of the peak how many bytes it has."""

    def __init__(self, simulator: StepSimulator, traces: list[BlockTrace], settings: EngineSettings) -> None:
        super().__init__(simulator, traces, settings)
        self.parts = [0] * len(PARTS)
        self.parts[BASE] = simulator.profile.base.total
        self.peak_parts = list(self.parts)
        self.highest_parts = self.peak_parts

    def _keep_highest(self) -> None:
        super()._keep_highest()
        self.highest_parts = self.peak_parts

    def _add_bytes(self, part: int, nbytes: int) -> None:
        super()._add_bytes(part, nbytes)
        self.parts[part] += nbytes

    def _rename_bytes(self, source: int, target: int, nbytes: int) -> None:
        self.parts[source] -= nbytes
        self.parts[target] += nbytes

    def _check_peak(self, phase: str, block: int, extra: int = 0, part: int = WORK) -> None:
        if self.live + extra > self.peak:
            self.peak_parts = list(self.parts)
            self.peak_parts[part] += extra
        super()._check_peak(phase, block, extra, part)

    def _run(self, event: TraceEvent, block: int) -> None:
        if self.live + event.peak > self.peak:
            self.peak_parts = list(self.parts)
            for part, nbytes in event.peak_parts:
                self.peak_parts[part] += nbytes
        for part, nbytes in event.net_parts:
            self.parts[part] += nbytes
        super()._run(event, block)

    def _parts_at_peak(self) -> tuple[int, ...]:
        assert sum(self.highest_parts) == max(self.moments), "the parts make up the peak"
        return tuple(self.highest_parts)
