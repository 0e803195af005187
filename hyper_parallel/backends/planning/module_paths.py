"""Where in the module tree this thread is: hooks that keep a stack of paths while blocks run, forward and replay alike."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from hyper_parallel.backends.planning.module_tree import BlockRef, Module, ModuleTree

__all__ = ["ModulePaths"]


class ModulePaths:
    """The path of the module that runs now. A copy, or one that was pickled, starts with nothing running."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.calls: Counter[str] = Counter()
        self._handles: list[Any] = []  # the frameworks' handles of hooks

    def __reduce__(self) -> tuple[Any, ...]:
        return ModulePaths, ()

    def watch(self, tree: ModuleTree, blocks: Iterable[BlockRef]) -> None:
        """Follow every module inside these blocks."""
        for block in blocks:
            for inner, module in tree.named(block.module):
                path = f"{block.name}.{inner}" if inner else block.name
                self._handles.append(module.register_forward_pre_hook(_Enter(self, path)))
                self._handles.append(module.register_forward_hook(_Leave(self, path), always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def stack(self) -> list[str]:
        """The paths of the modules that run now on this thread, outermost first."""
        stack: list[str] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


class _Enter:
    """A module's forward begins."""

    def __init__(self, paths: ModulePaths, path: str) -> None:
        self._paths = paths
        self._path = path

    def __call__(self, module: Module, args: Any) -> None:
        self._paths.stack.append(self._path)
        self._paths.calls[self._path] += 1


class _Leave:
    """A module's forward ended, or raised (a replay that stops early does)."""

    def __init__(self, paths: ModulePaths, path: str) -> None:
        self._paths = paths
        self._path = path

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        stack = self._paths.stack
        if self._path in stack:  # what an inner module could not report is below it
            del stack[len(stack) - 1 - stack[::-1].index(self._path) :]
