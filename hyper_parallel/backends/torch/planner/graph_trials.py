"""Trial steps of compiled blocks: what their own graph saves and takes, and what a graph takes that recomputes everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from hyper_parallel.backends.planning.segments import backward_seconds, call_of, forward_seconds, median
from hyper_parallel.backends.planning.trials import ALONE_WATCHED, REPLAYED, BlockCall, TrialPoint, TrialStep
from hyper_parallel.backends.torch.compiled_calls import COMPILATIONS
from hyper_parallel.backends.torch.planner.blocks import BlockRef
from hyper_parallel.backends.torch.planner.compiled import is_compiled
from hyper_parallel.planner.compiled_kind import MeasuredGraphs, fitted_to_graphs
from hyper_parallel.planner.profile import BlockKind

__all__ = ["GraphTrials", "compiled_kind"]


@dataclasses.dataclass
class GraphTrials:
    """The trials that read memory, and one that reads seconds."""

    replayed: TrialStep  # every compiled block recomputes everything in its graph
    alone: TrialStep  # the same, but the blocks that stand for their kinds are left alone
    compile_seconds: float  # of one graph
    timed: TrialStep | None = None  # as ``replayed``, for its seconds

    @classmethod
    def run(
        cls, blocks: Sequence[BlockRef], stand_ins: Collection[str], trial: Callable[..., TrialStep]
    ) -> GraphTrials | None:
        """Run them; None where no block is compiled. The first step of each sort compiles and is not read."""
        watched = {block.name for block in blocks if block.name in stand_ins and is_compiled(block.module)}
        if not watched:
            return None
        everywhere = {block.name: REPLAYED for block in blocks}
        trial(everywhere, reads_memory=True)
        replayed = trial(everywhere, reads_memory=True)
        how = {**everywhere, **dict.fromkeys(watched, ALONE_WATCHED)}
        trial(how, reads_memory=True)
        alone = trial(how, reads_memory=True)
        return cls(replayed, alone, COMPILATIONS.seconds / max(1, COMPILATIONS.count))


def compiled_kind(
    kind: BlockKind,
    graphs: GraphTrials,
    stand_in: str,
    members: Sequence[int],
    forward: float | None,
    backward: float | None,
) -> BlockKind:
    """A kind of compiled block. ``forward`` and ``backward``: seconds of the block left alone, where that fits."""
    alone, replayed = call_of(graphs.alone, stand_in), call_of(graphs.replayed, stand_in)
    if forward is None and graphs.timed is not None:
        forward = median([forward_seconds(graphs.timed, number) for number in members])
    seconds = None if graphs.timed is None else median([backward_seconds(graphs.timed, number) for number in members])
    return fitted_to_graphs(
        kind,
        MeasuredGraphs(
            saved_bytes=tuple(alone.saved_bytes.values()),
            forward_peak_bytes=_rise(graphs.alone, alone.forward_begin, alone.forward_end),
            backward_peak_bytes=_backward_rise(graphs.alone, alone),
            replayed_peak_bytes=_backward_rise(graphs.replayed, replayed),
            forward_seconds=forward,
            backward_seconds=backward,
            replayed_seconds=seconds,
            compile_seconds=graphs.compile_seconds,
        ),
    )


def _backward_rise(trial: TrialStep, call: BlockCall) -> int:
    """The peak of a block's backward, less what was there when it began. A block whose input needs no gradient has no end."""
    return _rise(trial, call.backward_begin, call.backward_end or trial.points[-1])


def _rise(trial: TrialStep, begin: TrialPoint | None, end: TrialPoint | None) -> int:
    if begin is None or end is None:
        return 0
    inside = trial.points[trial.points.index(begin) + 1 : trial.points.index(end) + 1]
    return max(0, max((point.peak_bytes for point in inside), default=0) - begin.active_bytes)
