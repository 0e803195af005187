"""Wrappers in the place of modules of a model: put in, taken out again, with nothing left behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hyper_parallel.backends.planning.blocks import locations_of
from hyper_parallel.backends.planning.framework import Framework
from hyper_parallel.backends.planning.module_tree import Module, ModuleLocation
from hyper_parallel.core.activation_checkpoint.statistics import SwapStats
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError

if TYPE_CHECKING:
    from typing import Self  # not in 3.10

__all__ = ["AppliedBlocks", "Replacements"]


@dataclasses.dataclass(frozen=True)
class _Replaced:
    path: str
    location: ModuleLocation
    original: Module
    wrapper: Module


class Replacements:
    """Wrappers that were put in the place of modules, and what is needed to take them out again."""

    def __init__(self, framework: Framework, model: Module) -> None:
        self._framework = framework
        self._model = model
        self._done: list[_Replaced] = []

    def wrap(
        self,
        path: str,
        module: Module,
        checkpoint_fn: Callable[..., Any],
        *,
        may_be_compiled: bool = False,
        may_be_in_graph: bool = False,
    ) -> None:
        """Let every call of ``module`` go through ``checkpoint_fn``.

        ``may_be_compiled``: the function treats the module as a whole and does not decide about single ops.
        ``may_be_in_graph``: the function's region can be put into the graph of a module that is compiled as a whole.
        """
        locations = locations_of(self._framework.tree, self._model, module)
        if not locations:
            raise PlanError(f"{path}: cannot be wrapped, because it is the model itself; name the modules inside it")
        if not may_be_compiled:
            self._framework.refuse_compiled(path, module, may_be_whole=may_be_in_graph)
        wrapper = self._framework.wrapped(module, checkpoint_fn)
        for location in locations:
            location.put(wrapper)
            self._done.append(_Replaced(path, location, module, wrapper))

    def restore(self) -> None:
        """Put the modules back, last first; a location that holds something else by now is an error."""
        taken = []
        while self._done:
            replaced = self._done.pop()
            if replaced.location.get() is replaced.wrapper:
                replaced.location.put(replaced.original)
            else:
                taken.append(replaced.path)
        if taken:
            raise PlanError(
                f"remove: cannot put {', '.join(taken[:4])} back, because something else was put in their place since. Take that "
                "off first; everything else is as it was."
            )

    def __len__(self) -> int:
        return len(self._done)


class AppliedBlocks:
    """Something applied to a model: a context manager whose end, or ``remove()``, takes it off again."""

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        SwapManager().restart_first_step()
        self._before = SwapManager().stats()
        self._first_step = SwapManager().first_step

    def stats(self) -> SwapStats:
        """What the engine counted since this was applied."""
        return SwapManager().stats().since(self._before)

    def summary(self) -> str:
        """One line: by how much memory fell in the first step, and what that cost."""
        line = self._first_step.line
        return line or "hyper_parallel: no step has run since this was applied, or its line is switched off"

    def remove(self) -> None:
        """Put the model back as it was; nothing happens the second time."""
        self._replacements.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
