"""The autograd engine, as far as the schedule needs it: which backward runs, and when it ends.

MindSpore does not say which node runs, so a walk over the graph has nowhere to begin: everything that was packed before
the value that is wanted now counts as wanted next. Packs are numbered here, one count for the process, because
MindSpore's own numbers of nodes begin again with every gradient.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable

from hyper_parallel.core.activation_checkpoint.forecast import Reach, everything_below
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.errors import ActivationError
from hyper_parallel.platform.mindspore import compat

__all__ = [
    "Backward",
    "current_task",
    "is_in_backward",
    "next_sequence",
    "remember_second_order",
    "refuse_second_order",
]

_NUMBERS = itertools.count(1)


def next_sequence() -> int:
    """A number higher than every one given so far."""
    return next(_NUMBERS)


def is_in_backward() -> bool:
    """Whether this thread runs inside a backward."""
    return compat.backward_id() is not None


class Backward:
    """The backward that runs now, at the moment when a value of this position is wanted."""

    __slots__ = ("_position", "key")

    def __init__(self, key: Hashable, position: Position) -> None:
        self.key = key
        self._position = position

    def reach(self) -> Reach:
        """Everything packed before."""
        return everything_below(self._position)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` when the backward is over; MindSpore does not call it when backward raises."""
        compat.at_end_of_backward(callback)


def current_task(position: Position) -> Backward | None:
    """The backward of this thread; None outside one."""
    key = compat.backward_id()
    return None if key is None else Backward(key, position)


class _ThisThread(threading.local):
    """The last backward of this thread that was recorded itself, so that it can be differentiated again."""

    second_order: int | None = None


_THIS_THREAD = _ThisThread()


def remember_second_order() -> None:
    """Remember, when backward asks for a value, whether this backward is recorded: a replay later in it cannot tell."""
    if compat.is_recording():
        _THIS_THREAD.second_order = compat.backward_id()


def refuse_second_order(where: str) -> None:
    """Raise in a backward that is recorded.

    MindSpore does not join what a hook or a mode returns to the graph that the saved value came from, so a part of the
    second derivative would silently be missing.
    """
    backward = compat.backward_id()
    if backward is not None and backward == _THIS_THREAD.second_order:
        raise ActivationError(
            f"{where}: cannot give a second derivative, because MindSpore loses the history of values that were kept or "
            "swapped by us. Use checkpoint without a policy and without swap_inputs there, or leave the wrapper off. If this "
            "step takes first derivatives only and an error ended the step before it, MindSpore was still recording: call "
            "hyper_parallel.platform.mindspore.compat.end_failed_gradient() after catching such an error."
        )
