"""``swap_tensor_wrapper`` on torch: when the pair of hooks at the bottom of a thread's stack comes and goes.

Torch shows which pair is on top of the stack, so that ours is taken off when the next tensor is marked or the manager is
reset, if by then no marked tensor lives and the pair is alone.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.backends.torch.saved_tensors import TorchPacker, unpack
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.marked_only import MarkedOnly
from hyper_parallel.core.activation_checkpoint.marks import THIS_THREAD, mark_tensors
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.torch import compat

__all__ = ["forget_bottom_hooks", "swap_tensor_wrapper"]


@compat.run_eagerly("swap_tensor_wrapper marks tensors of an eager forward; torch.compile breaks the graph here.")
def swap_tensor_wrapper(tree: Any, tag: str | None = None) -> Any:
    """See ``hyper_parallel.swap_tensor_wrapper``."""
    forget_bottom_hooks()
    has_marked = mark_tensors(tree, tag, tensors=TENSORS, marks=SwapManager().marks)
    if has_marked and THIS_THREAD.bottom is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        THIS_THREAD.take_off = forget_bottom_hooks
        THIS_THREAD.bottom = MarkedOnly(TorchPacker(where="swap_tensor_wrapper"))
        torch._C._autograd._push_saved_tensors_default_hooks(THIS_THREAD.bottom, unpack)
    return tree


def forget_bottom_hooks() -> None:
    """Take this thread's pair off again, if it is alone on the stack and no marked tensor lives."""
    bottom = THIS_THREAD.bottom
    # Inside a node of a backward torch puts the thread's hooks back afterwards, so what is taken off there stays on for good.
    if bottom is None or SwapManager().marks or TENSORS.is_in_backward():
        return
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is not None and top[0] is bottom:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        THIS_THREAD.bottom = None
