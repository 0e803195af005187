"""``swap_tensor_wrapper``: marked tensors leave when autograd saves them, also where no wrapper of ours is around.

Note: hooks at the bottom
    MindSpore shows a save to its stack of hooks only, and there to the innermost pair. Where a region of ours is active
    the mark overrules its policy. Where nothing is active, a pair of ours is put at the *bottom* of the empty stack, so
    that whatever the user pushes and pops later stays balanced above it. It takes marked tensors only. MindSpore does
    not say who is on top; when our pair is asked to pack, it is, and if no marked tensor lives it leaves then.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.packed import Handle, Kept
from hyper_parallel.backends.mindspore.saved_tensors import Packer, unpack
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.trees import tree_map
from hyper_parallel.platform.mindspore import compat

__all__ = ["swap_tensor_wrapper"]


class _ThisThread(threading.local):
    """Whether this thread has a pair of ours at the bottom of its stack."""

    has_bottom = False


_THIS_THREAD = _ThisThread()


class _MarkedOnly:
    """The pack hook at the bottom: marked tensors leave, all others only get their version checked."""

    def __init__(self) -> None:
        self._packer = Packer(where="swap_tensor_wrapper")

    def __call__(self, tensor: Any) -> Handle | Kept:
        marks = SwapManager().marks
        if storage_key(tensor) in marks:
            return self._packer.pack(tensor)
        if not marks:
            compat.pop_saved_tensors_hooks()
            _THIS_THREAD.has_bottom = False
        return Kept(tensor, "swap_tensor_wrapper")


def swap_tensor_wrapper(tree: Any, tag: str | None = None) -> Any:
    """See ``hyper_parallel.swap_tensor_wrapper``."""
    if tag is not None and not isinstance(tag, str):
        raise TypeError(f"swap_tensor_wrapper: the tag must be a string or None, got {tag!r}")
    if not compat.is_recording() or is_in_backward():
        return tree
    manager = SwapManager()
    has_marked = False

    def mark(leaf: Any) -> Any:
        nonlocal has_marked
        if type(leaf) is mindspore.Tensor:
            # The mark lives as long as the caller's tensor: nobody else can hand its storage to an op as this tensor.
            reference = weakref.ref(leaf)
            manager.marks.add(storage_key(leaf), tag, lambda: reference() is not None)
            has_marked = True
        return leaf

    tree_map(mark, tree)
    if has_marked and not _THIS_THREAD.has_bottom and not compat.has_saved_tensors_hooks():
        compat.push_saved_tensors_hooks(_MarkedOnly(), unpack)
        _THIS_THREAD.has_bottom = True
    return tree
