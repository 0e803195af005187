"""The end of the first step under ``checkpoint`` or ``swap``: the moment for the one-line summary."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.graph import current_task, is_in_backward
from hyper_parallel.core.activation_checkpoint.summary import is_wanted
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["foretell", "noted"]


def foretell(predicted_peak_bytes: int | None) -> None:
    """Let the line name what a plan expects."""
    if not torch.compiler.is_compiling():
        SwapManager().first_step.predicted_peak_bytes = predicted_peak_bytes


def noted(output: Any, *, is_recomputed: bool) -> Any:
    """Pass a region's output on. Until the first backward has run through one, its end is waited for."""
    first_step = SwapManager().first_step
    if first_step.is_over or is_in_backward():
        return output
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    if not nodes:
        return output
    if not is_wanted() or _is_another_rank():
        first_step.is_over = True
        return output
    first_step.recomputed_regions += is_recomputed
    for node in nodes:  # and not on the tensors: one with a hook warns when it is pickled
        node.register_prehook(_queue_line)
    return output


def _is_another_rank() -> bool:
    """Whether a process group says what ``RANK`` does not."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0


def _queue_line(_: Any) -> None:
    """A hook before a node: the line comes at the end of the backward that calls it."""
    manager = SwapManager()
    first_step = manager.first_step
    task = current_task()
    if task is not None and not first_step.is_over:
        first_step.is_over = True
        task.at_end(lambda: first_step.write_line(manager.stats()))
