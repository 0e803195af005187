"""Trial steps on MindSpore: points where blocks begin and end, forward and backward, and single blocks seen op by op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.ops import tensors_in
from hyper_parallel.backends.mindspore.planner.blocks import TREE
from hyper_parallel.backends.mindspore.planner.framework import MINDSPORE
from hyper_parallel.backends.mindspore.planner.op_observer import OpObserver
from hyper_parallel.backends.mindspore.planner.survey import on_backward
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.backends.planning.replacements import Replacements
from hyper_parallel.backends.planning.trials import (
    ALONE,
    KEEP_NOTHING,
    OBSERVED,
    REGION,
    REPLAYED_SWAPPED,
    BlockCall,
    TrialStep,
)
from hyper_parallel.platform.mindspore import compat

__all__ = ["trial_step"]


class _TrialBlock:
    """The checkpoint function of one block during a trial."""

    def __init__(self, block: BlockRef, how: str, paths: ModulePaths, trial: TrialStep) -> None:
        self._block = block
        self._how = how
        self._paths = paths
        self._trial = trial

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not compat.is_recording() or is_in_backward():
            return function(*args, **kwargs)
        trial, name = self._trial, self._block.name
        call = BlockCall(name)
        trial.calls.append(call)
        trial.begin_forward(call)
        on_backward((args, tuple(kwargs.values())), lambda: trial.end_backward(call))
        output = self._run(call, function, args, kwargs)
        call.forward_end = trial.point(f"{name} forward ends")
        call.output_bytes = _bytes_of(output)
        on_backward(output, lambda: trial.begin_backward(call))
        return output

    def _run(self, call: BlockCall, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if self._how == ALONE:
            return function(*args, **kwargs)
        if self._how != OBSERVED:
            return MINDSPORE.checkpoint(
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
            on_unpack=lambda op: _open_node(trial, call, op),
        )
        with observer.watching(args, kwargs):
            output = function(*args, **kwargs)
        call.seen = observer.seen
        return output


def _open_node(trial: TrialStep, call: BlockCall, op: int) -> None:
    """The backward of ``op`` asks for a value; it may ask for several."""
    if not call.nodes or call.nodes[-1].op != op:
        trial.open_node(call, op)


def _bytes_of(output: Any) -> int:
    return sum({storage_key(one): int(one.untyped_storage().nbytes()) for one in tensors_in((output,))}.values())


@contextlib.contextmanager
def trial_step(
    model: Any, blocks: Sequence[BlockRef], how: Mapping[str, str], meter: Meter, *, reads_memory: bool
) -> Iterator[TrialStep]:
    """One trial step is run inside; ``how`` says what happens to each block by name."""
    result = TrialStep(meter, reads_memory=reads_memory, holds={}, is_idle_before_blocks=False)
    paths, replacements = ModulePaths(), Replacements(MINDSPORE, model)
    ended = model.register_forward_hook(lambda *_: _mark_model_end(result))
    try:
        paths.watch(TREE, [block for block in blocks if how[block.name] == OBSERVED])
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
