"""The prediction that the summary line of the first step names. Its exception on torch: nothing is set while compiling."""

from __future__ import annotations

import torch

from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["set_predicted_peak"]


def set_predicted_peak(predicted_peak_bytes: int | None) -> None:
    """Let the line name the peak that a plan predicts."""
    if not torch.compiler.is_compiling():
        SwapManager().first_step.predicted_peak_bytes = predicted_peak_bytes
