"""``swap_tensor_wrapper`` on MindSpore: when the pair of hooks at the bottom of a thread's stack comes and goes.

MindSpore does not say which pair is on top of the stack. When our pair is asked to pack, it is on top; if no marked tensor
lives then, it is taken off.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.backends.mindspore.saved_tensors import MindSporePacker, unpack
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.marked_only import MarkedOnly
from hyper_parallel.core.activation_checkpoint.marks import THIS_THREAD, mark_tensors
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.mindspore import compat

__all__ = ["swap_tensor_wrapper"]


def swap_tensor_wrapper(tree: Any, tag: str | None = None) -> Any:
    """See ``hyper_parallel.swap_tensor_wrapper``."""
    has_marked = mark_tensors(tree, tag, tensors=TENSORS, marks=SwapManager().marks)
    if has_marked and THIS_THREAD.bottom is None and not compat.has_saved_tensors_hooks():
        THIS_THREAD.bottom = MarkedOnly(MindSporePacker(where="swap_tensor_wrapper"), _take_off)
        compat.push_saved_tensors_hooks(THIS_THREAD.bottom, unpack)
    return tree


def _take_off() -> None:
    compat.pop_saved_tensors_hooks()
    THIS_THREAD.bottom = None
