"""Trial steps that are measured: points where blocks begin and end, forward and backward, and single blocks seen op by op.

In a trial a block is *replayed* (as little memory as there is), *alone* (left as it is) or *observed* (alone, and seen op by
op, forward and backward). Reading memory takes time, so a trial reads either bytes or seconds.

A compiled block is observed uncompiled. It is replayed in its graph, and alone as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.trials import (
    ALONE,
    ALONE_WATCHED,
    KEEP_NOTHING,
    OBSERVED,
    REGION,
    REPLAYED,
    REPLAYED_SWAPPED,
    BlockCall,
    NodeRun,
    TrialPoint,
    TrialStep,
)
from hyper_parallel.backends.torch.checkpointing import checkpoint
from hyper_parallel.backends.torch.compiled_calls import NOT_COMPILED, call_compiled
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.graph_regions import InGraph
from hyper_parallel.backends.torch.planner.blocks import TREE, BlockRef
from hyper_parallel.backends.torch.planner.compiled import is_compiled, run_uncompiled
from hyper_parallel.backends.torch.planner.op_observer import OpObserver, plain_tensors
from hyper_parallel.backends.torch.planner.plan_regions import plan_region
from hyper_parallel.backends.torch.planner.replacements import Replacements
from hyper_parallel.backends.torch.planner.survey import on_backward
from hyper_parallel.backends.torch.storages import alias, is_parameter_derived
from hyper_parallel.platform.torch import compat

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
    "trial_step",
]


class _TrialBlock:
    """The checkpoint function of one block during a trial."""

    def __init__(self, block: BlockRef, how: str, paths: ModulePaths, trial: TrialStep) -> None:
        self._block = block
        self._is_compiled = is_compiled(block.module)
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
        if self._how == ALONE_WATCHED:
            with saved_tensors_hooks(_Saved(call, args, kwargs), _unchanged):
                return function(*args, **kwargs)
        if self._how != OBSERVED:
            if self._is_compiled:
                in_graph = InGraph(
                    region=plan_region(None, self._block.module),
                    bound={},
                    swaps_inputs=self._how == REPLAYED_SWAPPED,
                )
                output = call_compiled(in_graph, self._block.module, args, kwargs)
                if output is not NOT_COMPILED:
                    return output
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
            is_compiled=self._is_compiled,
        )
        function = run_uncompiled(function) if self._is_compiled else function
        with observer.watching(args, kwargs, sees_saved=trial.reads_memory):
            output = function(*args, **kwargs)
        call.seen = observer.seen
        _watch_nodes(trial, call, output)
        return output


class _Saved:
    """A pack hook that counts what a graph saves, without weights and the block's own inputs."""

    def __init__(self, call: BlockCall, args: Any, kwargs: dict[str, Any]) -> None:
        self._call = call
        self._inputs = {tensor.untyped_storage()._cdata for tensor in plain_tensors((args, kwargs))}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_parameter_derived(tensor):
            for plain in plain_tensors(tensor):
                storage = plain.untyped_storage()
                if storage._cdata not in self._inputs:
                    self._call.saved_bytes[storage._cdata] = storage.nbytes()
        return alias(tensor)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Dynamo must not trace what autograd calls while a compiled block runs.
compat.skip_in_compiler(_Saved.__call__)
compat.skip_in_compiler(_unchanged)


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
        paths.watch(TREE, [block for block in blocks if how[block.name] == OBSERVED])
        for block in blocks:
            region = _TrialBlock(block, how[block.name], paths, result)
            replacements.wrap(block.name, block.module, region, may_be_in_graph=True)
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
