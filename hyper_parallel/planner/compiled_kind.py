"""A compiled block's kind: ops that were observed uncompiled, fitted to what was measured of the block's graphs.

A compiler fuses element-wise ops. They take less time than alone, most of their outputs never exist, and its graph keeps
other values than autograd would. Matmuls, attention and convolutions are kernels of their own in a graph too: what time they
leave of the measured forward is what the other ops take together. The same holds for what is recomputed in backward, of which the
graph that recomputes everything is measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, RUN, Choice, KindAnalysis, TraceEvent, make_block_trace
from hyper_parallel.planner.profile import BlockKind, CompiledGraph, OpProfile
from hyper_parallel.planner.rules import ALIASES

__all__ = ["MeasuredGraphs", "fitted_to_graphs"]

_KERNELS_OF_THEIR_OWN: Final = frozenset(name for alias in ("matmul", "sdpa", "conv") for name in ALIASES[alias])
_SIDE_OUTPUT: Final = 8  # what an op makes beside its output is smaller than this part of it
_MOST_REPLAYED: Final = 2.0  # a graph may make copies that the uncompiled block does not
_LEAST_FUSED: Final = 0.02  # of its own time that a fused op counts for, so that cheap ops keep an order


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredGraphs:
    """What was measured of one block: its own graph, and one that recomputes everything. Bytes are above those at the start."""

    saved_bytes: tuple[int, ...]  # of each storage that its own graph keeps; without weights and inputs
    forward_peak_bytes: int
    backward_peak_bytes: int
    replayed_peak_bytes: int  # of the backward that recomputes everything
    forward_seconds: float | None = None  # None: not known
    backward_seconds: float | None = None
    replayed_seconds: float | None = None  # of the backward that recomputes everything
    compile_seconds: float = 0.0  # of one graph


def fitted_to_graphs(kind: BlockKind, measured: MeasuredGraphs) -> BlockKind:
    """The kind, with the seconds and the bytes of the compiled block."""
    kind = dataclasses.replace(
        kind, cuts=kind.cuts[:1], runs_from_tape=True, backward_transient_bytes=measured.backward_peak_bytes
    )
    kind = _with_seconds(kind, measured)
    saves, other_bytes = _saved_ops(kind, measured.saved_bytes)
    graph = CompiledGraph(saves=saves, other_bytes=other_bytes, compile_seconds=measured.compile_seconds)
    graph = dataclasses.replace(graph, forward_share=_forward_share(kind, graph, measured.forward_peak_bytes))
    graph = dataclasses.replace(graph, replay_share=_replay_share(kind, graph, measured.replayed_peak_bytes))
    return dataclasses.replace(kind, graph=graph)


# ---------------------------------------------------------------------- seconds


def _with_seconds(kind: BlockKind, measured: MeasuredGraphs) -> BlockKind:
    seconds = [op.seconds for op in kind.ops]
    if measured.forward_seconds is not None:
        seconds = _shared_out(kind.ops, seconds, range(len(seconds)), measured.forward_seconds)
    ops = tuple(dataclasses.replace(op, seconds=now, backward_bytes=0) for op, now in zip(kind.ops, seconds))
    kind = dataclasses.replace(kind, ops=ops)
    again, _ = KindAnalysis(kind).needed(kind.cuts[0].regions[0], ())
    replay, backward = sum(seconds[at] for at in again), kind.backward_seconds
    if measured.backward_seconds is not None:
        backward = measured.backward_seconds
    elif measured.replayed_seconds is not None:  # the step left alone does not fit
        backward = max(measured.replayed_seconds - replay, 0.5 * measured.replayed_seconds)
    if measured.replayed_seconds is not None and measured.backward_seconds is not None:
        beyond = max(0.0, measured.replayed_seconds - measured.backward_seconds)
        replayed = _shared_out(ops, seconds, again, beyond)
        ops = tuple(dataclasses.replace(op, replay_seconds=now) for op, now in zip(ops, replayed))
    return dataclasses.replace(kind, ops=ops, backward_seconds=backward)


def _shared_out(ops: Sequence[OpProfile], seconds: Sequence[float], among: Sequence[int], total: float) -> list[float]:
    """The seconds of these ops, so that they add up to ``total``; no op takes more than alone."""
    own = sum(seconds[at] for at in among if _is_kernel(ops[at]))
    fused = sum(seconds[at] for at in among if not _is_kernel(ops[at]))
    of_kernels = min(1.0, total / own) if own else 1.0
    of_fused = min(1.0, max(_LEAST_FUSED, (total - own) / fused)) if fused else 1.0
    return [value * (of_kernels if _is_kernel(op) else of_fused) for op, value in zip(ops, seconds)]


def _is_kernel(op: OpProfile) -> bool:
    return op.name in _KERNELS_OF_THEIR_OWN


# ---------------------------------------------------------------------- bytes


def _saved_ops(kind: BlockKind, storages: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The ops whose outputs these storages are, found by their sizes; and the bytes of all that belongs to none."""
    found: set[int] = set()
    for nbytes in sorted(storages, reverse=True):
        fits = [
            at
            for at, op in enumerate(kind.ops)
            if at not in found and op.alias is None and 0 <= op.output_bytes - nbytes <= nbytes // _SIDE_OUTPUT
        ]
        if fits:
            found.add(min(fits, key=functools.partial(_unlikelihood, kind, nbytes)))
    return tuple(sorted(found)), max(0, sum(storages) - sum(kind.ops[at].output_bytes for at in found))


def _unlikelihood(kind: BlockKind, nbytes: int, at: int) -> tuple[bool, bool, bool, int]:
    op = kind.ops[at]
    return not op.kept_bytes, op.output_bytes != nbytes, not _is_kernel(op), at


def _forward_share(kind: BlockKind, graph: CompiledGraph, peak: int) -> float:
    peaks = [
        _peak(_traced(kind, dataclasses.replace(graph, forward_share=share), LEFT_ALONE)[0]) for share in (0.0, 1.0)
    ]
    return _share(peaks, peak, most=1.0)


def _replay_share(kind: BlockKind, graph: CompiledGraph, peak: int) -> float:
    everything = Choice(0, (Fate.SAVE,), (Fate.RECOMPUTE,) * len(kind.ops))
    peaks = [
        _peak(_traced(kind, dataclasses.replace(graph, replay_share=share), everything)[1]) for share in (0.0, 1.0)
    ]
    return _share(peaks, peak, most=_MOST_REPLAYED)


def _share(peaks: Sequence[int], peak: int, *, most: float) -> float:
    """Where the measured peak lies between none and all of the bytes, or beyond."""
    none, everything = peaks
    return min(most, max(0.0, (peak - none) / (everything - none))) if everything > none else 1.0


def _traced(kind: BlockKind, graph: CompiledGraph, choice: Choice) -> tuple[Sequence[TraceEvent], Sequence[TraceEvent]]:
    analysis = KindAnalysis(dataclasses.replace(kind, graph=graph))
    trace = make_block_trace(analysis, choice, input_bytes=0, min_bytes=0)
    return trace.forward, trace.backward


def _peak(events: Sequence[TraceEvent]) -> int:
    """Above what was there at the start."""
    now = highest = 0
    for event in events:
        if event.what == RUN:
            highest = max(highest, now + event.peak)
            now += event.net
    return highest
