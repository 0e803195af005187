"""Storages that the user marked inside a forward: they leave at their next save, also where no wrapper of ours is around.

Note: hooks at the bottom
    A framework shows a save to its stack of hooks only, and there to the innermost pair. Where a region of ours is active the
    mark overrules its policy. Where nothing is active, a pair of ours is put at the *bottom* of the thread's empty stack, so
    that whatever the user pushes and pops later stays balanced above it. It takes marked tensors only. When it is taken off
    again depends on what the framework tells about its stack (``marks`` of each framework).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.trees import tree_map

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.adapter import TensorAdapter

__all__ = ["THIS_THREAD", "BottomHooks", "Marks", "mark_tensors"]


class Marks:
    """Which storages leave at their next save whatever the policy around them says, and the tags they carry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: dict[int, tuple[str | None, Callable[[], bool]]] = {}
        self.has_any = False  # marked since the last reset, alive or not

    def add(self, storage_key: int, tag: str | None, is_alive: Callable[[], bool]) -> None:
        """Mark a storage."""
        with self._lock:
            self._marked = {key: mark for key, mark in self._marked.items() if mark[1]()}
            self._marked[storage_key] = (tag, is_alive)
            self.has_any = True

    def __contains__(self, storage_key: int | None) -> bool:
        mark = None if storage_key is None else self._marked.get(storage_key)
        return mark is not None and mark[1]()

    def tag_of(self, storage_key: int) -> str | None:
        """The name under which a storage was marked."""
        mark = self._marked.get(storage_key)
        return mark[0] if mark is not None and mark[1]() else None

    def __bool__(self) -> bool:
        return any(is_alive() for _, is_alive in list(self._marked.values()))


class BottomHooks(threading.local):
    """The pack hook that this thread has at the bottom of its stack, if any, and how it is taken off where a framework can."""

    bottom: Any = None
    take_off: Callable[[], None] | None = None


THIS_THREAD = BottomHooks()


def mark_tensors(tree: Any, tag: str | None, *, tensors: TensorAdapter, marks: Marks) -> bool:
    """Mark the tensors of ``tree``, where autograd records a forward. Whether there was one."""
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"swap_tensor_wrapper: the tag must be a string or None, got {tag!r}")
    if not tensors.is_recording() or tensors.is_in_backward():
        return False
    marked: list[Any] = []

    def mark(leaf: Any) -> Any:
        if tensors.can_be_marked(leaf):
            marks.add(tensors.storage_key(leaf), tag, tensors.storage_watch(leaf, leaf))
            marked.append(leaf)
        return leaf

    tree_map(mark, tree)
    return bool(marked)
