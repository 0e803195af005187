"""The trace of one block with given fates: work, bytes that come and go, and values that leave, in order.

A trace is made once for each (kind, choice) and simulated many times; what depends on other blocks (the link, the window,
the tail) is left to ``step_simulator``. Everything between two such moments is one ``RUN`` with its own inner peak.

How long bytes live
-------------------
==============================  =====================================================================================
left alone, kept by autograd    forward of its op ... backward of the earliest op that holds it
local                           forward of its op ... its last reader
saved in a region, collective   forward of its op ... end of the region's backward (entries are not consumed)
input of a region               forward of its maker ... end of the region's backward
swapped                         a record: see ``step_simulator``; after its replay it lives on while autograd holds it
recomputed                      its replay ... backward of the earliest op of the region that holds it
==============================  =====================================================================================

What a replay runs
------------------
Where Python runs again (``BlockKind.runs_from_tape`` is False), every op up to the last one that backward needs, except those
whose outputs are saved or swapped; a swapped value is fetched where its op would have run.
From a tape, only the ops whose outputs backward needs, or such an op reads, and no op before a kept output for that output's
sake. A swapped value is fetched before the first op that reads it; one that only backward reads is fetched there; one that
nothing reads stays where it is.
A compiled block recomputes inside its graph, which runs what is needed, as a tape does. Left alone it keeps what its own graph
saves (``BlockKind.graph``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from hyper_parallel.fates import Fate
from hyper_parallel.planner.profile import BLOCK_INPUT, BlockKind, CutRegion, HostCost

__all__ = [
    "LEFT_ALONE",
    "PARTS",
    "KindAnalysis",
    "Choice",
    "TraceEvent",
    "BlockTrace",
    "make_block_trace",
    "replayed_ops",
]

# The peak by what it is made of. The order is that of the vectors below.
PARTS: Final = (
    "base",
    "left alone",
    "saved",
    "region inputs",
    "swap buffers",
    "working set",
    "gradients",
    "head and loss",
    "not explained",  # measured, and not known what it is: corrections of the moment
)
BASE, ALONE, SAVED, INPUTS, SWAP, WORK, GRADIENTS, HEAD, UNEXPLAINED = range(len(PARTS))

# The kinds of event that a trace is made of.
RUN, ADMIT, RELEASE, PREFETCH, FETCH, LET_GO, FREE, END = range(8)

FORWARD, REPLAY, BACKWARD = "forward", "replay", "backward"

_NO_HOST: Final = HostCost()


class Choice(NamedTuple):
    """What becomes of one block under one cut into regions."""

    cut: int  # index into BlockKind.cuts; -1: the block is left alone
    inputs: tuple[Fate, ...]  # of each region's input
    fates: tuple[Fate, ...]  # of each op's output


LEFT_ALONE: Final = Choice(-1, (), ())


class TraceEvent(NamedTuple):
    """One moment. ``RUN`` uses all fields, the others ``record``, ``phase`` and ``host_seconds``."""

    what: int
    record: int = -1
    seconds: float = 0.0
    peak: int = 0  # highest bytes inside, above those at its start
    net: int = 0  # bytes at its end, above those at its start
    peak_parts: tuple[tuple[int, int], ...] = ()  # (part, bytes) at the peak, above those at its start
    net_parts: tuple[tuple[int, int], ...] = ()
    phase: str = FORWARD
    host_seconds: float = 0.0  # what the host takes to issue it, without what regions add; of a swap: all
    region_seconds: float = 0.0  # what the host takes beside, because a region records its ops or runs them again


@dataclasses.dataclass(frozen=True)
class BlockTrace:
    """A block, ready to be simulated."""

    forward: tuple[TraceEvent, ...]
    backward: tuple[TraceEvent, ...]
    records: tuple[int, ...]  # bytes of each swapped value
    wanted: tuple[int, ...]  # records in the order backward asks for them
    compute_seconds: float
    replay_seconds: float
    replayed_ops: int
    events: int  # how long it is


class KindAnalysis:
    """Which ops of a kind read, share and keep which values; worked out once for each kind."""

    def __init__(self, kind: BlockKind) -> None:
        self.kind = kind
        count = len(kind.ops)
        self.root: list[int] = []
        for at, op in enumerate(kind.ops):
            alias = op.alias
            self.root.append(at if alias is None else alias if alias == BLOCK_INPUT else self.root[alias])
        self.last_read = {at: at for at in range(BLOCK_INPUT, count)}
        first_read: dict[int, int] = {}
        for at, op in enumerate(kind.ops):
            for value in self.roots(op.inputs):
                self.last_read[value] = at
                if op.alias is None:
                    first_read.setdefault(value, at)
        self.last_read[self.root[-1]] = count  # the block's output is read by what follows
        self.kept_by = {
            at: tuple(sorted(op.kept_by)) or (first_read.get(at, at),) if op.kept_bytes else ()
            for at, op in enumerate(kind.ops)
        }
        self.kept_by[BLOCK_INPUT] = tuple(sorted(kind.input_kept_by))
        self.replay_seconds = [op.seconds if op.replay_seconds is None else op.replay_seconds for op in kind.ops]
        self._share_out_backward(kind)

    def roots(self, values: Iterable[int]) -> list[int]:
        """The values behind views."""
        return [value if value == BLOCK_INPUT else self.root[value] for value in values]

    def _share_out_backward(self, kind: BlockKind) -> None:
        own = [op.backward_seconds for op in kind.ops]
        if not any(own):
            own = [op.seconds for op in kind.ops]
        total = sum(own)
        scale = kind.backward_seconds / total if kind.backward_seconds and total else 1.0
        if not any(op.backward_seconds for op in kind.ops) and not kind.backward_seconds:
            scale = 0.0
        self.backward_seconds = [seconds * scale for seconds in own]
        self.knows_backward_bytes = any(op.backward_bytes for op in kind.ops)

    def needed(self, region: CutRegion, there: Collection[int]) -> tuple[list[int], dict[int, int]]:
        """The ops of a region that a tape runs where the values ``there`` are kept, and which of them reads a value last."""
        own = range(region.first_op, region.stop_op)
        wanted = {value for value in own if value not in there and any(op in own for op in self.kept_by[value])}
        last_read: dict[int, int] = {}
        found = []
        for at in reversed(own):
            op = self.kind.ops[at]
            changes_it = op.alias is not None and op.reason == "in_place" and self.root[at] in wanted
            if not changes_it and (op.alias is not None or at not in wanted):
                continue
            found.append(at)
            for value in self.roots(op.inputs):
                last_read.setdefault(value, at)
                if value in own and value not in there:
                    wanted.add(value)
        return found[::-1], last_read

    def spared(self, region: CutRegion, kept: Collection[int], at: int) -> frozenset[int]:
        """The ops that a replay of the region runs no more where the output of op ``at`` is kept as well as ``kept``.

        A replay in Python runs every op whose output is not kept. A tape also leaves out the ops that only this one needed.
        """
        if not self.kind.runs_from_tape:
            return frozenset({at}) if at < self.replay_stop(region) and at not in kept else frozenset()
        there = {*kept, *(number for number, op in enumerate(self.kind.ops) if op.runs_once)}
        with_it = self.needed(region, {*there, at})[0]
        return frozenset(self.needed(region, there)[0]).difference(with_it)

    def is_ever_replayed(self, region: CutRegion, at: int) -> bool:
        """Whether a replay of the region that keeps nothing runs op ``at``: something in backward reads what it makes."""
        return at in self.needed(region, ())[0] if self.kind.runs_from_tape else at < self.replay_stop(region)

    def seconds_of(self, ops: Iterable[int]) -> float:
        """What a replay of these ops takes."""
        return sum(self.replay_seconds[at] for at in ops)

    def replay_stop(self, region: CutRegion) -> int:
        """The replay ends before this op: nothing later in the region is needed again."""
        if region.replay_stop is not None:
            return region.replay_stop
        stop = region.first_op
        for value, keepers in self.kept_by.items():
            for keeper in keepers:
                if region.first_op <= keeper < region.stop_op:
                    stop = max(stop, keeper + 1 if keeper == value else keeper)
        return stop


class _Writer:
    """Collects work and bytes into runs, and closes a run where something else happens."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.phase = FORWARD
        self.seconds = 0.0
        self.replay_seconds = 0.0
        self._begin()

    def _begin(self) -> None:
        self._run_seconds = self._host_seconds = self._region_seconds = 0.0
        self._net = self._peak = 0
        self._parts = [0] * len(PARTS)
        self._peak_parts = tuple(self._parts)
        self._is_empty = True

    def bytes(self, part: int, nbytes: int) -> None:
        if nbytes:
            self._is_empty = False
            self._parts[part] += nbytes
            self._net += nbytes

    def touch(self, extra: int = 0) -> None:
        """Something runs here, with ``extra`` bytes of its own."""
        if self._net + extra > self._peak:
            self._peak = self._net + extra
            parts = list(self._parts)
            parts[WORK] += extra
            self._peak_parts = tuple(parts)
            self._is_empty = False

    def work(self, seconds: float) -> None:
        if seconds:
            self._is_empty = False
            self._run_seconds += seconds
            if self.phase == REPLAY:
                self.replay_seconds += seconds
            else:
                self.seconds += seconds

    def issue(self, seconds: float, *, for_region: float = 0.0) -> None:
        """The host spends this, and some more for a region."""
        if seconds or for_region:
            self._is_empty = False
            self._host_seconds += seconds
            self._region_seconds += for_region

    def close(self) -> None:
        if not self._is_empty:
            sparse = tuple((part, nbytes) for part, nbytes in enumerate(self._parts) if nbytes)
            at_peak = tuple((part, nbytes) for part, nbytes in enumerate(self._peak_parts) if nbytes)
            self.events.append(
                TraceEvent(
                    RUN,
                    -1,
                    self._run_seconds,
                    self._peak,
                    self._net,
                    at_peak,
                    sparse,
                    self.phase,
                    self._host_seconds,
                    self._region_seconds,
                ),
            )
        self._begin()

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.close()
            self.phase = phase

    def emit(self, what: int, record: int = -1, *, host_seconds: float = 0.0) -> None:
        self.close()
        self.events.append(TraceEvent(what, record, phase=self.phase, host_seconds=host_seconds))


class _Block:
    """A kind with a choice: where each value lives."""

    def __init__(
        self, analysis: KindAnalysis, choice: Choice, input_bytes: int, min_bytes: int, host: HostCost
    ) -> None:
        self.analysis = analysis
        self.host = host
        self.kind = analysis.kind
        self.choice = choice
        self.count = len(self.kind.ops)
        self.regions = () if choice.cut < 0 else self.kind.cuts[choice.cut].regions
        self.region_of: list[int | None] = [None] * self.count
        for number, region in enumerate(self.regions):
            self.region_of[region.first_op : region.stop_op] = [number] * (region.stop_op - region.first_op)
        self.nbytes = {at: op.output_bytes for at, op in enumerate(self.kind.ops)} | {BLOCK_INPUT: input_bytes}
        self.kept = {at: op.kept_bytes for at, op in enumerate(self.kind.ops)} | {BLOCK_INPUT: input_bytes}
        graph = self.kind.graph
        self.forward_share, self.replay_share = (
            (1.0, 1.0) if graph is None else (graph.forward_share, graph.replay_share)
        )
        self.beside = 0  # bytes that the block's own graph keeps beside the outputs of ops
        if graph is not None and not self.regions:
            self.beside = graph.other_bytes
            self.kept |= {at: self.nbytes[at] if at in graph.saves else 0 for at in range(self.count)}
        self.alone_until: dict[int, int] = {}  # value -> the op whose backward lets go of it
        self.inputs_of: list[list[int]] = [[] for _ in self.regions]  # saved ones, by the region that lets go of them
        self.saved_of: list[list[int]] = [[] for _ in self.regions]
        self.record_of: dict[int, int] = {}
        self.records: list[int] = []
        self.records_of: list[list[int]] = [[] for _ in self.regions]  # by the region that lets go of them
        self.fetched_by: dict[int, int] = {}  # record -> the region whose replay asks for it first
        self.admitted_at: dict[int, list[int]] = {}  # op -> values that become records before it runs
        for value in range(BLOCK_INPUT, self.count):
            if self.nbytes[value]:
                self._place(value, min_bytes)

    def _place(self, value: int, min_bytes: int) -> None:
        keepers = [op for op in self.analysis.kept_by[value] if self.region_of[op] is None]
        takers = [number for number, region in enumerate(self.regions) if value in self.analysis.roots(region.inputs)]
        home = None if value == BLOCK_INPUT else self.region_of[value]
        if not self.regions and self.kind.graph is not None and value != BLOCK_INPUT:
            if self.kept[value]:
                self.alone_until[value] = min(keepers, default=value)
        elif keepers:
            self.alone_until[value] = min(keepers[0], *(self.regions[number].first_op for number in takers), self.count)
        elif takers:
            if self.choice.inputs[takers[0]] is Fate.SWAP and self.nbytes[value] >= min_bytes:
                self._record(value, holder=takers[0], asker=takers[-1])
                self.admitted_at.setdefault(self.regions[takers[0]].first_op, []).append(value)
            else:
                self.inputs_of[takers[0]].append(value)
        elif home is not None:
            fate = self.choice.fates[value]
            if fate is Fate.SWAP and self.nbytes[value] >= min_bytes:
                self._record(value, holder=home, asker=home)
            elif fate is not Fate.RECOMPUTE or self.kind.ops[value].runs_once:
                self.saved_of[home].append(value)

    def _record(self, value: int, *, holder: int, asker: int) -> None:
        self.record_of[value] = number = len(self.records)
        self.records.append(self.nbytes[value])
        self.records_of[holder].append(number)
        self.fetched_by[number] = asker


def make_block_trace(
    analysis: KindAnalysis, choice: Choice, *, input_bytes: int, min_bytes: int, host: HostCost = _NO_HOST
) -> BlockTrace:
    """The trace of one block."""
    block = _Block(analysis, choice, input_bytes, min_bytes, host)
    forward, backward = _Writer(), _Writer()
    _write_forward(block, forward)
    replayed_ops = _write_backward(block, backward)
    asked = [event.record for event in backward.events if event.what == FETCH]
    wanted = dict.fromkeys([*asked, *range(len(block.records))])  # what nothing asks for comes last
    return BlockTrace(
        forward=tuple(forward.events),
        backward=tuple(backward.events),
        records=tuple(block.records),
        wanted=tuple(wanted),
        compute_seconds=forward.seconds + backward.seconds,
        replay_seconds=backward.replay_seconds,
        replayed_ops=replayed_ops,
        events=len(forward.events) + len(backward.events),
    )


def replayed_ops(kind: BlockKind) -> int:
    """How many ops run again where a block of this kind is one region and everything in it is recomputed."""
    everything = Choice(0, (Fate.SAVE,) * len(kind.cuts[0].regions), (Fate.RECOMPUTE,) * len(kind.ops))
    return make_block_trace(KindAnalysis(kind), everything, input_bytes=0, min_bytes=0).replayed_ops


def _write_forward(block: _Block, writer: _Writer) -> None:
    saved = {value for values in block.saved_of for value in values}
    held = {value for values in block.inputs_of for value in values}
    local_bytes: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    taken = {value for values in block.admitted_at.values() for value in values}

    def add_value(value: int) -> None:
        nbytes = block.nbytes[value]
        if not nbytes:
            return
        ends.setdefault(block.analysis.last_read[value], []).append(value)
        local = nbytes
        if value in block.alone_until:
            writer.bytes(ALONE, block.kept[value])
            local -= block.kept[value]
        elif value in saved or value in held:
            writer.bytes(SAVED if value in saved else INPUTS, nbytes)
            local = 0
        local = local if value in block.record_of else int(local * block.forward_share)
        writer.bytes(WORK, local)
        local_bytes[value] = local

    def admit(value: int, now: int) -> None:
        writer.emit(ADMIT, block.record_of[value], host_seconds=block.host.swap_out_seconds)
        local_bytes[value] = 0
        last_read = block.analysis.last_read[value]
        if last_read < now:
            writer.emit(RELEASE, block.record_of[value])
            # An input that no recorded op reads (compiled code, raw kernels) has no reader left: it is released here only.
            if value in ends.get(last_read, ()):
                ends[last_read].remove(value)

    add_value(BLOCK_INPUT)
    writer.touch()
    issuing = block.kind.host_forward_seconds / block.count
    begins = {region.first_op for region in block.regions}
    for at, op in enumerate(block.kind.ops):
        recording = 0.0 if block.region_of[at] is None else block.host.region_op_seconds
        writer.issue(issuing, for_region=recording + (block.host.region_seconds if at in begins else 0.0))
        for value in block.admitted_at.get(at, ()):
            admit(value, at)
        add_value(at)
        writer.touch(op.workspace_bytes)
        writer.work(op.seconds)
        if at in block.record_of and at not in taken:
            admit(at, at)
        _die(block, writer, ends.pop(at, ()), local_bytes)
    _die(block, writer, [value for values in ends.values() for value in values], local_bytes)
    writer.bytes(ALONE, block.beside)
    writer.close()


def _die(block: _Block, writer: _Writer, values: Iterable[int], local_bytes: dict[int, int]) -> None:
    for value in values:
        record = block.record_of.get(value)
        if record is not None and local_bytes[value] == 0:
            writer.emit(RELEASE, record)
        elif record is None:
            writer.bytes(WORK, -local_bytes[value])


def _write_backward(block: _Block, writer: _Writer) -> int:
    """Returns how many ops are run again."""
    writer.phase = BACKWARD
    writer.bytes(GRADIENTS, block.kind.gradient_bytes)
    frees: dict[int, list[int]] = {}
    for value, until in block.alone_until.items():
        frees.setdefault(until, []).append(value)
    is_first = True
    replayed = 0
    at = block.count - 1
    while at >= 0:
        number = block.region_of[at]
        if number is None:
            _write_backward_of_op(block, writer, at, is_first=is_first)
            at -= 1
        else:
            replayed += _write_region(block, writer, number)
            at = block.regions[number].first_op - 1
        is_first = number is not None
        for until in [until for until in frees if until > at]:
            writer.bytes(ALONE, -sum(block.kept[value] for value in frees.pop(until)))
    writer.bytes(ALONE, -block.beside - sum(block.kept[value] for values in frees.values() for value in values))
    writer.close()
    return replayed


def _write_backward_of_op(block: _Block, writer: _Writer, at: int, *, is_first: bool) -> None:
    """Where only the whole block's transient bytes are known, they stand at the start of each stretch."""
    if block.analysis.knows_backward_bytes:
        writer.touch(block.kind.ops[at].backward_bytes)
    else:
        writer.touch(block.kind.backward_transient_bytes if is_first else 0)
    writer.work(block.analysis.backward_seconds[at])
    writer.issue(block.kind.host_backward_seconds / block.count)


def _write_region(block: _Block, writer: _Writer, number: int) -> int:
    analysis, region = block.analysis, block.regions[number]
    own = range(region.first_op, region.stop_op)
    kept_until = {
        value: min(keepers) for value in own if (keepers := [op for op in analysis.kept_by[value] if op in own])
    }
    replay = _Replay(block, number, kept_until)
    frees: dict[int, list[int]] = {}
    for value, until in kept_until.items():
        frees.setdefault(until, []).append(value)
    working: dict[int, int] = {}
    writer.issue(0.0, for_region=block.host.region_backward_seconds)
    for at in reversed(own):
        if at == replay.at:
            working = _write_replay(block, writer, replay)
        for record in replay.fetched_in_backward.get(at, ()):
            writer.emit(FETCH, record, host_seconds=block.host.swap_in_seconds)
        _write_backward_of_op(block, writer, at, is_first=at == region.stop_op - 1)
        for value in frees.get(at, ()):
            if value in working:
                writer.bytes(WORK, -working[value])
            elif value in block.record_of:
                writer.emit(FREE, block.record_of[value])
    writer.bytes(SAVED, -sum(block.nbytes[value] for value in block.saved_of[number]))
    writer.bytes(INPUTS, -sum(block.nbytes[value] for value in block.inputs_of[number]))
    for record in block.records_of[number]:
        writer.emit(END, record)
    return len(replay.runs)


class _Replay:
    """Which ops of a region run again, and which records it fetches when."""

    def __init__(self, block: _Block, number: int, kept_until: dict[int, int]) -> None:
        self.region = block.regions[number]
        self.kept_until = kept_until
        self._block = block
        own = range(self.region.first_op, self.region.stop_op)
        self.stop = block.analysis.replay_stop(self.region)
        self._asked = sorted(
            (value, record) for value, record in block.record_of.items() if block.fetched_by[record] == number
        )
        self._there = {*block.saved_of[number], *(value for value, _ in self._asked)}
        self.own_records = [(value, record) for value, record in self._asked if value in own]
        self.fetched_before: dict[int, list[int]] = {}  # by op
        self.fetched_in_backward: dict[int, list[int]] = {}  # by op
        self.at = self.region.stop_op - 1  # the replay comes before this op's backward
        if block.kind.runs_from_tape:
            self.runs, self.last_read = block.analysis.needed(self.region, self._there)
            missing = [value for value in self.kept_until if value not in self._there]
            self.at = max((max(self._keepers(value)) for value in missing), default=self.at)
            self._fetch_for_readers()
        else:
            self.runs = [at for at in range(self.region.first_op, self.stop) if at not in self._there]
            self.last_read = block.analysis.last_read
            for value, record in self._asked:  # the region's inputs first
                self.fetched_before.setdefault(max(value, self.region.first_op), []).append(record)

    def _keepers(self, value: int) -> list[int]:
        """The ops of the region whose backward reads it."""
        region = self.region
        return [op for op in self._block.analysis.kept_by[value] if region.first_op <= op < region.stop_op]

    def _fetch_for_readers(self) -> None:
        analysis = self._block.analysis
        first_read: dict[int, int] = {}
        for at in self.runs:
            for value in analysis.roots(analysis.kind.ops[at].inputs):
                first_read.setdefault(value, at)
        for value, record in self._asked:
            if value in first_read:
                self.fetched_before.setdefault(first_read[value], []).append(record)
            elif keepers := self._keepers(value):
                self.fetched_in_backward.setdefault(max(keepers), []).append(record)


def _write_replay(block: _Block, writer: _Writer, replay: _Replay) -> dict[int, int]:
    """Returns the bytes that stay for backward, by value."""
    writer.enter(REPLAY)
    if replay.own_records:
        writer.emit(PREFETCH)
    ends: dict[int, int] = {}  # op -> local bytes that go after it
    working: dict[int, int] = {}
    runs = set(replay.runs)
    for at in range(replay.region.first_op, replay.stop):
        for record in replay.fetched_before.get(at, ()):
            writer.emit(FETCH, record, host_seconds=block.host.swap_in_seconds)
        if at in runs:
            op = block.kind.ops[at]
            made = int(op.output_bytes * block.replay_share)
            stays = min(made, int(block.kept[at] * block.replay_share)) if at in replay.kept_until else 0
            writer.bytes(WORK, made)
            if stays:
                working[at] = stays
            last = min(max(replay.last_read.get(at, at), at), replay.stop - 1)
            ends[last] = ends.get(last, 0) + made - stays
            writer.touch(op.workspace_bytes)
            writer.work(block.analysis.replay_seconds[at])
            writer.issue(0.0, for_region=block.host.replayed_op_seconds)
        writer.bytes(WORK, -ends.pop(at, 0))
    writer.touch()
    fetched = {record for records in replay.fetched_before.values() for record in records}
    for value, record in replay.own_records:
        if record in fetched:
            writer.emit(LET_GO if value in replay.kept_until else FREE, record)
    writer.enter(BACKWARD)
    return working
