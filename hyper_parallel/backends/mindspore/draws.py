"""What is drawn in Python while a region runs: a replay draws the same again, and leaves the streams as it found them.

MindSpore counts the calls of its random functions and makes their seeds of the counts. Numpy's global stream is seeded by
``mindspore.set_seed`` and feeds MindSpore's own initialisers, so that numbers of it in a forward are as much a part of the
step as a dropout's. The same is done for ``random``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_checkpoint.python_state import PythonState
from hyper_parallel.platform.mindspore import compat

__all__ = ["Drawing"]


class _OpSeeds:
    """The counts of MindSpore's random functions. There is one such source, so that ``source`` says nothing."""

    def read(self, source: Any) -> Any:
        return compat.op_seeds()

    def write(self, source: Any, state: Any) -> None:
        compat.restore_op_seeds(state)

    def is_same(self, one: Any, two: Any) -> bool:
        return bool(one == two)


_OP_SEEDS = _OpSeeds()


class Drawing:
    """The context of a forward: remembers where the streams stood before it."""

    def __init__(self) -> None:
        self._streams = PythonState()

    def __enter__(self) -> None:
        self._streams.remember_source(_OP_SEEDS, _OP_SEEDS)
        self._streams.remember_global_draws()

    def __exit__(self, *exc: object) -> None:
        self._streams.keep_changes()

    def put_back(self) -> Callable[[], None]:
        """Let the streams go on from where forward found them. The answer puts them where they are now."""
        return self._streams.put_back()
