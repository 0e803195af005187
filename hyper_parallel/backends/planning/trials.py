"""What is measured of a trial step: points where blocks begin and end, and what ran in between.

In a trial a block is *replayed* (as little memory as there is), *alone* (left as it is) or *observed* (alone, and seen op by
op, forward and backward). Reading memory takes time, so a trial reads either bytes or seconds. A compiled block is observed
uncompiled, and *watched* alone: what its graph saves is counted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.observed import ObservedCall
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

__all__ = [
    "ALONE",
    "ALONE_WATCHED",
    "KEEP_NOTHING",
    "OBSERVED",
    "REGION",
    "REPLAYED",
    "REPLAYED_SWAPPED",
    "BlockCall",
    "NodeRun",
    "TrialPoint",
    "TrialStep",
]

ALONE, OBSERVED, REPLAYED, REPLAYED_SWAPPED = "alone", "observed", "replayed", "replayed, inputs swapped"
ALONE_WATCHED = "alone, and what its graph saves is counted"  # a compiled block
REGION = "a region whose policy keeps nothing"  # what asking costs the host
KEEP_NOTHING: Final = ByOpName({})


@dataclasses.dataclass
class TrialPoint:
    """One moment of a trial step."""

    name: str
    mark: Any = None  # a meter's mark
    active_bytes: int = 0
    peak_bytes: int = 0  # since the point before
    host_seconds: float = 0.0


@dataclasses.dataclass
class NodeRun:
    """One autograd node of an observed block, while it ran."""

    op: int
    mark: Any = None
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclasses.dataclass
class BlockCall:
    """One call of one block."""

    block: str
    forward_begin: TrialPoint | None = None
    forward_end: TrialPoint | None = None
    backward_begin: TrialPoint | None = None
    backward_end: TrialPoint | None = None
    output_bytes: int = 0
    seen: ObservedCall | None = None
    saved_bytes: dict[int, int] = dataclasses.field(default_factory=dict)  # by storage, of a watched block
    nodes: list[NodeRun] = dataclasses.field(default_factory=list)


class TrialStep:
    """What was measured of one step: points, calls of blocks, and the autograd nodes of observed blocks.

    ``holds``: for how long the device is held before a block's forward and backward, by its name, so that the host is ahead.
    ``is_idle_before_blocks``: the device is waited for before that, so that nothing holds the host up.
    """

    def __init__(
        self, meter: Meter, *, reads_memory: bool, holds: Mapping[str, tuple[float, float]], is_idle_before_blocks: bool
    ) -> None:
        self.meter = meter
        self.reads_memory = reads_memory
        self.holds = holds
        self.is_idle_before_blocks = is_idle_before_blocks
        self.points: list[TrialPoint] = []
        self.calls: list[BlockCall] = []
        self._open_node: NodeRun | None = None
        self._in_backward: BlockCall | None = None  # the call whose backward began last

    def point(self, name: str) -> TrialPoint:
        """This moment."""
        self.close_node()
        point = TrialPoint(name, host_seconds=time.perf_counter())
        if self.reads_memory:
            point.active_bytes, point.peak_bytes = self.meter.active_bytes(), self.meter.peak_bytes()
            self.meter.reset_peak()
        else:
            point.mark = self.meter.mark()
        self.points.append(point)
        return point

    def begin_forward(self, call: BlockCall) -> None:
        """The moment before a block's forward."""
        call.forward_begin = self._begin(call, is_backward=False)

    def begin_backward(self, call: BlockCall) -> None:
        """The moment before a block's backward; again for every further output."""
        if call.backward_begin is not None:
            return
        before, self._in_backward = self._in_backward, call
        if self.is_idle_before_blocks and before is not None:
            # The same gradient ends one block and begins the next, and this hook is asked first: what follows is not the
            # other block's any more.
            self.end_backward(before)
        call.backward_begin = self._begin(call, is_backward=True)

    def end_backward(self, call: BlockCall) -> None:
        """The moment after a block's backward; later ones, of further inputs, do not count."""
        point = self.point(f"{call.block} backward ends")
        if call.backward_end is None:
            call.backward_end = point

    def _begin(self, call: BlockCall, *, is_backward: bool) -> TrialPoint:
        name = f"{call.block} backward" if is_backward else f"{call.block} forward"
        hold = self.holds.get(call.block, (0.0, 0.0))[is_backward]
        if not self.is_idle_before_blocks:  # only what is inside the block is read: the hold may count for it
            point = self.point(name)
            self.meter.hold(hold)
            return point
        self.close_node()
        self.meter.wait()
        self.meter.hold(hold)
        return self.point(name)

    def open_node(self, call: BlockCall, op: int) -> None:
        """A node of an observed block begins."""
        self.close_node()
        node = NodeRun(op)
        if self.reads_memory:
            self.meter.reset_peak()
        else:
            node.mark = self.meter.mark()
        call.nodes.append(node)
        self._open_node = node

    def close_node(self) -> None:
        """The node that ran has ended."""
        node, self._open_node = self._open_node, None
        if node is None:
            return
        if self.reads_memory:
            node.peak_bytes = self.meter.peak_bytes()
        else:
            node.mark = (node.mark, self.meter.mark())

    def finish(self) -> None:
        """The step is over: read the clocks."""
        self.meter.wait()
        for call in self.calls:
            for node in call.nodes:
                if isinstance(node.mark, tuple):
                    node.seconds = self.meter.seconds(*node.mark)
                    node.mark = None

    def seconds(self, start: TrialPoint, end: TrialPoint) -> float:
        """Device time between two points of a trial that reads seconds."""
        return self.meter.seconds(start.mark, end.mark)
