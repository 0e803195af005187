"""Contexts of a region that several threads may be inside at once: two backwards of one graph may replay it together."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Nested", "Replay"]


class Nested:
    """Several contexts as one, the first outermost. Each thread leaves what it entered."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts
        self._entered: dict[int, list[contextlib.ExitStack]] = {}

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context)
            self._entered.setdefault(threading.get_ident(), []).append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered[threading.get_ident()].pop().__exit__(kind, error, trace)


class _State(Protocol):
    def put_back(self) -> Callable[[], None]:
        """Put the state in place; the answer restores what was there."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []


class Replay:
    """The context of a replay: a state that forward found is in place while it runs."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._here = _PerThread()

    def __enter__(self) -> None:
        self._here.undo.append(self._state.put_back())

    def __exit__(self, *exc: object) -> None:
        self._here.undo.pop()()
