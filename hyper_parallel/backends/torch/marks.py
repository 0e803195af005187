"""``swap_tensor_wrapper``: marked tensors leave when autograd saves them, also where no wrapper of ours is around.

Note: hooks at the bottom
    Torch has no other way to see a save than its stack of default hooks, and only the innermost pair sees it. Where a
    region of ours is active the mark overrules its policy. Where nothing is active, a pair of ours is put at the *bottom*
    of this thread's empty stack, so that whatever the user pushes and pops later stays balanced above it; it only takes
    marked tensors, and it goes when the last marked tensor is gone.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.packed import Handle, Kept
from hyper_parallel.backends.torch.saved_tensors import Packer, unpack
from hyper_parallel.backends.torch.storages import alias, storage_watch
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.trees import tree_map
from hyper_parallel.platform.torch import compat

__all__ = ["forget_bottom_hooks", "swap_tensor_wrapper"]


class _MarkedOnly:
    """The pack hook at the bottom: marked tensors leave, all others only get their version checked."""

    def __init__(self) -> None:
        self._packer = Packer(where="swap_tensor_wrapper")

    def __call__(self, tensor: torch.Tensor) -> Handle | Kept:
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if is_plain and tensor.untyped_storage()._cdata in SwapManager().marks:
            return self._packer.pack(tensor)
        return Kept(alias(tensor), tensor._version, "swap_tensor_wrapper")


class _ThisThread(threading.local):
    """The pair that this thread has at the bottom of its stack, if any."""

    bottom: _MarkedOnly | None = None


_THIS_THREAD = _ThisThread()


@compat.run_eagerly("swap_tensor_wrapper marks tensors of an eager forward; torch.compile breaks the graph here.")
def swap_tensor_wrapper(tree: Any, tag: str | None = None) -> Any:
    """See ``hyper_parallel.swap_tensor_wrapper``."""
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"swap_tensor_wrapper: the tag must be a string or None, got {tag!r}")
    forget_bottom_hooks()
    if not torch.is_grad_enabled() or is_in_backward():
        return tree
    manager = SwapManager()
    has_marked = False

    def mark(leaf: Any) -> Any:
        nonlocal has_marked
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            manager.marks.add(storage._cdata, tag, storage_watch(storage))
            has_marked = True
        return leaf

    tree_map(mark, tree)
    if has_marked and _THIS_THREAD.bottom is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        _THIS_THREAD.bottom = _MarkedOnly()
        torch._C._autograd._push_saved_tensors_default_hooks(_THIS_THREAD.bottom, unpack)
    return tree


def forget_bottom_hooks() -> None:
    """Take this thread's pair off again, if it is alone on the stack and no marked tensor lives."""
    bottom = _THIS_THREAD.bottom
    # Inside a node of a backward torch puts the thread's hooks back afterwards, so what is taken off there stays on for good.
    if bottom is None or SwapManager().marks or is_in_backward():
        return
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is not None and top[0] is bottom:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        _THIS_THREAD.bottom = None
