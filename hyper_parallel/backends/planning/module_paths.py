"""Where in the module tree this thread is: hooks that keep a stack of paths while blocks run, forward and replay alike."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.backends.planning.module_tree import BlockRef, Module, ModuleTree

__all__ = ["ModulePaths", "path_in_block"]


def path_in_block(block: str, inner: str) -> str:
    """The path of a module inside a block; that of ``torch.compile(module)`` is the module's own."""
    return ".".join(name for name in (block, *inner.split(".")) if name not in ("", "_orig_mod"))


def _never() -> bool:
    return False


class ModulePaths:
    """The path of the module that runs now. A copy, or one that was pickled, starts with nothing running.

    ``is_compiling``: whether a compiler traces this call. A traced graph knows the module of each op, so no path is kept there.
    """

    def __init__(self, is_compiling: Callable[[], bool] = _never) -> None:
        self._is_compiling = is_compiling
        self._local = threading.local()
        self.calls: Counter[str] = Counter()
        self._handles: list[Any] = []  # the frameworks' handles of hooks

    def __reduce__(self) -> tuple[Any, ...]:
        return ModulePaths, (self._is_compiling,)

    def watch(self, tree: ModuleTree, blocks: Iterable[BlockRef]) -> None:
        """Follow every module inside these blocks."""
        for block in blocks:
            self.watch_module(tree, block.name, block.module)

    def watch_module(self, tree: ModuleTree, name: str, root: Module) -> None:
        """Follow a module and every module inside it; an empty name is the model itself."""
        for inner, module in tree.named(root):
            path = path_in_block(name, inner)
            enter, leave = _Enter(self, path, self._is_compiling), _Leave(self, path, self._is_compiling)
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

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

    def __init__(self, paths: ModulePaths, path: str, is_compiling: Callable[[], bool]) -> None:
        self._paths = paths
        self._path = path
        self._is_compiling = is_compiling

    def __call__(self, module: Module, args: Any) -> None:
        if self._is_compiling():
            return
        self._paths.stack.append(self._path)
        self._paths.calls[self._path] += 1


class _Leave:
    """A module's forward ended, or raised (a replay that stops early does)."""

    def __init__(self, paths: ModulePaths, path: str, is_compiling: Callable[[], bool]) -> None:
        self._paths = paths
        self._path = path
        self._is_compiling = is_compiling

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if self._is_compiling():
            return
        stack = self._paths.stack
        if self._path in stack:  # what an inner module could not report is below it
            del stack[len(stack) - 1 - stack[::-1].index(self._path) :]
