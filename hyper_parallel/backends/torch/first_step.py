"""The prediction that the summary line of the first step names. Its exception on torch: nothing is set while compiling."""

from __future__ import annotations

import torch

from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["set_predicted"]


def set_predicted(predicted: MemoryChange | None) -> None:
    """Let the line name what a plan predicts."""
    if not torch.compiler.is_compiling():
        SwapManager().first_step.predicted = predicted
