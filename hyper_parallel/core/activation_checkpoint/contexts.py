"""Contexts of a region that several threads may be inside at once: two backwards of one graph may replay it together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

__all__ = ["Nested", "Replay"]


class Nested:
    """Several contexts as one, the first outermost. Each of them knows which of its entries a thread leaves.

    Not an ``ExitStack``: where a context raises while it is left, that makes a cycle of the error and its frames, and a step
    that failed would hold its values until a collection.
    """

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for number, context in enumerate(self.contexts):
            try:
                context.__enter__()
            except BaseException as error:
                _leave(self.contexts[:number], type(error), error, error.__traceback__)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return _leave(self.contexts, kind, error, trace)


def _leave(
    contexts: tuple[Any, ...],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> bool:
    """Leave the innermost first, and the others even if it raises. Whether one of them took the error."""
    if not contexts:
        return False
    is_taken = False
    try:
        is_taken = bool(contexts[-1].__exit__(kind, error, trace))
    finally:
        if is_taken:
            kind = error = trace = None
        is_taken |= _leave(contexts[:-1], kind, error, trace)
    return is_taken


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
