"""Storages that the user marked inside a forward, by name; forgotten with the storage."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Marks"]


class Marks:
    """Which storages leave at their next save whatever the policy around them says, and the tags they carry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marked: dict[int, tuple[str | None, Callable[[], bool]]] = {}

    def add(self, storage_key: int, tag: str | None, is_alive: Callable[[], bool]) -> None:
        """Mark a storage."""
        with self._lock:
            self._marked = {key: mark for key, mark in self._marked.items() if mark[1]()}
            self._marked[storage_key] = (tag, is_alive)

    def __contains__(self, storage_key: int) -> bool:
        mark = self._marked.get(storage_key)
        return mark is not None and mark[1]()

    def tag_of(self, storage_key: int) -> str | None:
        """The name under which a storage was marked."""
        mark = self._marked.get(storage_key)
        return mark[0] if mark is not None and mark[1]() else None

    def __bool__(self) -> bool:
        return any(is_alive() for _, is_alive in list(self._marked.values()))
