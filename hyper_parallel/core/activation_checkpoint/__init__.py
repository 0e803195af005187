"""The engine room: what happens to a saved value. Policies, records, schedule, far memory; no framework."""

from hyper_parallel.core.activation_checkpoint.activation_checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = [
    "CheckpointPolicy",
    "SwapManager",
    "checkpoint",
    "checkpoint_wrapper",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
]
