"""Trial steps that are measured: points where blocks begin and end, forward and backward, and single blocks seen op by op.

In a trial a block is *replayed* (as little memory as there is), *alone* (left as it is) or *observed* (alone, and seen op by
op, forward and backward). Reading memory takes time, so a trial reads either bytes or seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.checkpointing import checkpoint
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.planner.blocks import BlockRef
from hyper_parallel.backends.torch.planner.meters import Meter
from hyper_parallel.backends.torch.planner.module_paths import ModulePaths
from hyper_parallel.backends.torch.planner.op_observer import ObservedCall, OpObserver, plain_tensors
from hyper_parallel.backends.torch.planner.replacements import Replacements
from hyper_parallel.backends.torch.planner.survey import on_backward
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

__all__ = [
    "ALONE",
    "KEEP_NOTHING",
    "OBSERVED",
    "REGION",
    "REPLAYED",
    "REPLAYED_SWAPPED",
    "BlockCall",
    "NodeRun",
    "TrialPoint",
    "TrialStep",
    "trial_step",
]

ALONE, OBSERVED, REPLAYED, REPLAYED_SWAPPED = "alone", "observed", "replayed", "replayed, inputs swapped"
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


class _TrialBlock:
    """The checkpoint function of one block during a trial."""

    def __init__(self, block: BlockRef, how: str, paths: ModulePaths, trial: TrialStep) -> None:
        self._block = block
        self._how = how
        self._paths = paths
        self._trial = trial

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or is_in_backward():
            return function(*args, **kwargs)
        trial, name = self._trial, self._block.name
        call = BlockCall(name)
        trial.calls.append(call)
        trial.begin_forward(call)
        on_backward((args, kwargs), lambda _: trial.end_backward(call))
        output = self._run(call, function, args, kwargs)
        call.forward_end = trial.point(f"{name} forward ends")
        call.output_bytes = _bytes_of(output)
        on_backward(output, lambda _: trial.begin_backward(call))
        return output

    def _run(self, call: BlockCall, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self._how == ALONE:
            return function(*args, **kwargs)
        if self._how != OBSERVED:
            return checkpoint(
                function,
                *args,
                swap_inputs=self._how == REPLAYED_SWAPPED,
                policy_fn=KEEP_NOTHING if self._how == REGION else None,
                **kwargs,
            )
        trial = self._trial
        observer = OpObserver(
            self._block.name,
            self._paths,
            clock=None if trial.reads_memory else trial.meter,
            memory=trial.meter if trial.reads_memory else None,
        )
        with observer.watching(args, kwargs, sees_saved=trial.reads_memory):
            output = function(*args, **kwargs)
        call.seen = observer.seen
        _watch_nodes(trial, call, output)
        return output


def _bytes_of(output: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain_tensors(output)}
    return sum(storages.values())


def _watch_nodes(trial: TrialStep, call: BlockCall, output: Any) -> None:
    """Have every node that the block's forward made say when it runs."""
    seen = call.seen
    assert seen is not None, "the block was observed"
    op_of: dict[int, int] = {}
    for index, op in enumerate(seen.ops):
        op_of.setdefault(op.sequence, index)
    found: set[Any] = set()  # torch.autograd.graph.Node
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    stack: list[Any] = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in found or not seen.first_sequence <= node._sequence_nr() < seen.last_sequence:
            continue
        found.add(node)
        stack.extend(child for child, _ in node.next_functions if child is not None)
    for node in found:
        at = op_of.get(node._sequence_nr())
        if at is not None:
            node.register_prehook(_NodeBegins(trial, call, at))


class _NodeBegins:
    """A prehook."""

    def __init__(self, trial: TrialStep, call: BlockCall, op: int) -> None:
        self._trial = trial
        self._call = call
        self._op = op

    def __call__(self, gradients: Any) -> None:
        self._trial.open_node(self._call, self._op)


@contextlib.contextmanager
def trial_step(
    model: nn.Module,
    blocks: Sequence[BlockRef],
    how: Mapping[str, str],
    meter: Meter,
    *,
    reads_memory: bool,
    holds: Mapping[str, tuple[float, float]] | None = None,
    is_idle_before_blocks: bool = False,
) -> Iterator[TrialStep]:
    """One trial step is run inside; ``how`` says what happens to each block by name. For the rest see :class:`TrialStep`."""
    result = TrialStep(meter, reads_memory=reads_memory, holds=holds or {}, is_idle_before_blocks=is_idle_before_blocks)
    paths, replacements = ModulePaths(), Replacements(model)
    ended = model.register_forward_hook(lambda *_: _mark_model_end(result))
    try:
        paths.watch([block for block in blocks if how[block.name] == OBSERVED])
        for block in blocks:
            replacements.wrap(block.name, block.module, _TrialBlock(block, how[block.name], paths, result))
        meter.reset_peak()
        result.point("step")
        yield result
        result.point("step ends")
        result.finish()
    finally:
        ended.remove()
        paths.remove()
        replacements.restore()


def _mark_model_end(result: TrialStep) -> None:
    if not is_in_backward():
        result.point("model forward ends")
