"""The survey of a step: which blocks it runs, in which order, with which ops; under as little memory as there is.

Every block is replayed and its inputs are swapped, so that a step that does not fit when it is left alone can be
surveyed as well. Compiled blocks run uncompiled, because compiled code does not show its ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.survey import Survey, op_table, require_step
from hyper_parallel.backends.torch.checkpointing import checkpoint
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.planner.blocks import TREE, BlockRef, device_of, require_module
from hyper_parallel.backends.torch.planner.compiled import is_compiled, refuse_compiled_around, run_uncompiled
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.backends.torch.planner.op_observer import OpObserver
from hyper_parallel.backends.torch.planner.replacements import Replacements
from hyper_parallel.backends.torch.planner.step_inputs import shapes_of
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.planner.rules import OpTable
from hyper_parallel.planner.step_inputs import InputShape
from hyper_parallel.platform.torch import compat

__all__ = ["Survey", "list_ops", "require_step", "surveyed"]


class _SurveyedBlock:
    """The checkpoint function of one block while the survey is taken."""

    def __init__(self, block: BlockRef, paths: ModulePaths, survey: Survey) -> None:
        self._block = block
        self._is_compiled = is_compiled(block.module)
        self._paths = paths
        self._survey = survey

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self._is_compiled:
            function = run_uncompiled(function)
        shapes = shapes_of(compat.uncompiled(self._block.module), args, kwargs)
        self._survey.add_inputs(self._block.name, shapes)
        output = checkpoint(self._forward(function, shapes), *args, swap_inputs=True, **kwargs)
        on_backward(output, self._has_backward)
        return output

    def _forward(self, function: Callable[..., Any], shapes: tuple[InputShape, ...]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_in_backward():
                return function(*args, **kwargs)
            observer = OpObserver(self._block.name, self._paths, is_compiled=self._is_compiled)
            with observer.watching(args, kwargs, sees_saved=False):
                output = function(*args, **kwargs)
            self._survey.calls.append(observer.seen)
            self._survey.shapes.append(shapes)
            return output

        return forward

    def _has_backward(self, _: Any) -> None:
        self._survey.has_backward = True


def on_backward(output: Any, callback: Callable[[Any], None]) -> None:
    """Call back when the first gradient of one of these tensors is there: the backward of what made them begins."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if tensors:
        torch.autograd.graph.register_multi_grad_hook(tensors, callback, mode="any")


@contextlib.contextmanager
def surveyed(model: nn.Module, blocks: Sequence[BlockRef], *, who: str) -> Iterator[Survey]:
    """Blocks that are replayed and observed; they are put back at the end."""
    refuse_compiled_around(who, model, blocks)
    survey, paths, replacements = Survey(), ModulePaths(), Replacements(model)

    def add_model_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            survey.add_inputs("", shapes_of(module, args, kwargs))

    hook = model.register_forward_pre_hook(add_model_inputs, with_kwargs=True)
    try:
        paths.watch(TREE, blocks)
        for block in blocks:
            region = _SurveyedBlock(block, paths, survey)
            replacements.wrap(block.name, block.module, region, may_be_in_graph=True)
        yield survey
    finally:
        hook.remove()
        paths.remove()
        replacements.restore()


def list_ops(model: Any, step: Callable[[], Any], *, blocks: str | Sequence[str] | None = None) -> OpTable:
    """See ``hyper_parallel.list_ops``."""
    who = "list_ops"
    require_module(model, who)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    with restored_after(model, device_of(model, who), who=who):
        with surveyed(model, found, who=who) as survey:
            step()
        survey.check(who, found)
    return op_table(survey.calls)
