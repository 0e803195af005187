"""The end of the first step under ``checkpoint`` or ``swap``: the moment for the one-line summary."""

from __future__ import annotations

from typing import Any

import mindspore
import mindspore.mint.distributed as dist

from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.core.activation_checkpoint.summary import is_wanted
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.trees import tree_map
from hyper_parallel.platform.mindspore import compat

__all__ = ["noted"]


def noted(output: Any, *, is_recomputed: bool) -> Any:
    """Pass a region's output on. Until the first backward has run through one, its end is waited for."""
    first_step = SwapManager().first_step
    if first_step.is_over or not compat.is_recording() or is_in_backward():
        return output
    if not is_wanted() or (compat.GlobalComm.INITED and dist.get_rank() != 0):
        first_step.is_over = True
        return output
    first_step.recomputed_regions += is_recomputed
    tree_map(_watch, output)
    return output


def _watch(leaf: Any) -> Any:
    if isinstance(leaf, mindspore.Tensor) and leaf.is_floating_point():
        leaf.register_hook(_queue_line)
    return leaf


def _queue_line(_: Any) -> None:
    """A gradient hook: the line comes at the end of the backward that calls it."""
    manager = SwapManager()
    first_step = manager.first_step
    if not first_step.is_over and is_in_backward():
        first_step.is_over = True
        compat.at_end_of_backward(lambda: first_step.write_line(manager.stats()))
