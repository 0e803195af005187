"""A declared order of layers, as the user holds it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Chain"]


class Chain:
    """A declared order of two layers. A hint; ``remove()`` takes it back."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Forget the declaration."""
        if self._remove is not None:
            self._remove()
            self._remove = None
