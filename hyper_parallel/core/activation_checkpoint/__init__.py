"""The engine: what happens to a saved value. Policies, packer, regions, records, schedule, far memory; no framework."""

# The submodule `swap` first: importing it binds its name here, and the function of that name must come after.
from hyper_parallel.core.activation_checkpoint.swap import SwapManager  # isort: skip
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_wrapper,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

__all__ = [
    "CheckpointPolicy",
    "SwapManager",
    "checkpoint",
    "checkpoint_wrapper",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
]
