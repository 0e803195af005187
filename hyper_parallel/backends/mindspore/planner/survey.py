"""The survey of a step on MindSpore: which blocks it runs, in which order, with which ops; under as little memory as there is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.ops import tensors_in
from hyper_parallel.backends.mindspore.planner.blocks import TREE, find_blocks, require_cell
from hyper_parallel.backends.mindspore.planner.framework import MINDSPORE
from hyper_parallel.backends.mindspore.planner.op_observer import OpObserver
from hyper_parallel.backends.mindspore.planner.trial_guard import restored_after
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.backends.planning.replacements import Replacements
from hyper_parallel.backends.planning.step_inputs import shapes_of
from hyper_parallel.backends.planning.survey import Survey, op_table, require_step
from hyper_parallel.planner.rules import OpTable
from hyper_parallel.planner.step_inputs import InputShape
from hyper_parallel.platform.mindspore import compat

__all__ = ["find_blocks_of_step", "list_ops", "on_backward", "surveyed"]


class _Names:
    """A number for every tensor that was given to a block. An object's address alone may name another later."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._numbers = itertools.count(1)

    def number_of(self, tensor: Any) -> int:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._known[id(tensor)] = weakref.ref(tensor), next(self._numbers)
        return known[1]


class _SurveyedBlock:
    """The checkpoint function of one block while the survey is taken."""

    def __init__(self, block: BlockRef, paths: ModulePaths, survey: Survey, names: _Names) -> None:
        self._block = block
        self._paths = paths
        self._survey = survey
        self._names = names

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not compat.is_recording():
            return function(*args, **kwargs)
        shapes = shapes_of(MINDSPORE, self._block.module, args, kwargs)
        self._survey.add_inputs(self._block.name, shapes)
        given = {
            self._names.number_of(tensor): int(tensor.untyped_storage().nbytes())
            for tensor in tensors_in((args, tuple(kwargs.values())))
        }
        run = self._forward(function, shapes, given)
        output = MINDSPORE.checkpoint(run, *args, swap_inputs=True, **kwargs)
        on_backward(output, self._has_backward)
        return output

    def _forward(
        self, function: Callable[..., Any], shapes: tuple[InputShape, ...], given: dict[int, int]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_in_backward():
                return function(*args, **kwargs)
            observer = OpObserver(self._block.name, self._paths)
            with observer.watching(args, kwargs):
                output = function(*args, **kwargs)
            observer.seen.input_storages = given
            self._survey.calls.append(observer.seen)
            self._survey.shapes.append(shapes)
            return output

        return forward

    def _has_backward(self) -> None:
        self._survey.has_backward = True


def on_backward(output: Any, callback: Callable[[], None]) -> None:
    """Call back when a gradient of one of these tensors is there: the backward of what made them begins."""
    for tensor in tensors_in((output,)):
        if tensor._requires_grad and not isinstance(tensor, mindspore.Parameter):
            tensor.register_hook(functools.partial(_called_back, callback))


def _called_back(callback: Callable[[], None], gradient: Any) -> None:
    callback()


@contextlib.contextmanager
def surveyed(model: Any, blocks: Sequence[BlockRef]) -> Iterator[Survey]:
    """Blocks that are replayed and observed; they are put back at the end."""
    survey = Survey(
        without_gradients="mindspore._no_grad()", how_to_differentiate="differentiates it (mindspore.value_and_grad)"
    )
    paths, names = ModulePaths(), _Names()
    replacements = Replacements(MINDSPORE, model)

    def add_model_inputs(cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compat.is_recording():
            survey.add_inputs("", shapes_of(MINDSPORE, cell, args, kwargs))

    hook = model.register_forward_pre_hook(add_model_inputs, with_kwargs=True)
    try:
        paths.watch(TREE, blocks)
        for block in blocks:
            replacements.wrap(block.name, block.module, _SurveyedBlock(block, paths, survey, names))
        yield survey
    finally:
        hook.remove()
        paths.remove()
        replacements.restore()


def list_ops(model: Any, step: Callable[[], Any], *, blocks: str | Sequence[str] | None = None) -> OpTable:
    """See ``hyper_parallel.list_ops``."""
    who = "list_ops"
    require_cell(model, who)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    with restored_after(model, who=who):
        with surveyed(model, found) as survey:
            step()
        survey.check(who, found)
    return op_table(survey.calls)


def find_blocks_of_step(
    model: Any, patterns: str | Sequence[str] | None, step: Callable[[], Any], *, who: str
) -> list[BlockRef]:
    """The blocks of a model, also those that are only repeated because the step calls them many times."""
    return find_blocks(model, patterns, who=who, calls=lambda: _count_calls(model, step, who))


def _count_calls(model: Any, step: Callable[[], Any], who: str) -> Mapping[str, int]:
    """Run the step once and count; a step that fails fails again when it is measured."""
    counts: Counter[str] = Counter()

    def count(path: str, cell: Any, args: Any) -> None:
        if not is_in_backward():
            counts[path] += 1

    hooks = [cell.register_forward_pre_hook(functools.partial(count, path)) for path, cell in TREE.named(model)]
    try:
        with restored_after(model, who=who), contextlib.suppress(Exception):
            step()
    finally:
        compat.end_failed_gradient()
        for hook in hooks:
            hook.remove()
    return counts
