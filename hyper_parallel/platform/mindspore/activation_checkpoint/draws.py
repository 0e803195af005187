"""What is drawn in Python while a region runs: a replay draws the same again, and leaves the streams as it found them.

Two streams are meant. MindSpore counts the calls of its random functions and makes their seeds of the counts. And
numpy's global stream is seeded by ``mindspore.set_seed`` and feeds MindSpore's own initialisers, so that numbers of it in
a forward are as much a part of the step as a dropout's.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from hyper_parallel.platform.mindspore import compat

__all__ = ["Drawing", "DrawingAgain"]


class Drawing:
    """The context of a forward: remembers where the streams stood before it."""

    def __init__(self) -> None:
        self.op_seeds: Any = None
        self.numpy_state: Any = None  # None as well when forward took nothing of it: reading it twice is dear

    def __enter__(self) -> None:
        self.op_seeds = compat.op_seeds()
        self.numpy_state = np.random.get_state()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _is_same(self.numpy_state, np.random.get_state()):
            self.numpy_state = None


class DrawingAgain:
    """The context of a replay of that forward."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._op_seeds: Any = None
        self._numpy_state: Any = None

    def __enter__(self) -> None:
        self._op_seeds = compat.op_seeds()
        compat.restore_op_seeds(self._drawing.op_seeds)
        self._numpy_state = None
        if self._drawing.numpy_state is not None:
            self._numpy_state = np.random.get_state()
            np.random.set_state(self._drawing.numpy_state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        compat.restore_op_seeds(self._op_seeds)
        if self._numpy_state is not None:
            np.random.set_state(self._numpy_state)


def _is_same(one: Any, two: Any) -> bool:  # (name, keys, position, has_gauss, gauss)
    return bool(one[0] == two[0] and one[2:] == two[2:] and np.array_equal(one[1], two[1]))
