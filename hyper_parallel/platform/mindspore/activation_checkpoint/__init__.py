"""Activation memory on MindSpore: hooks, selective regions, wrappers. The schedule itself is in ``core``."""

from hyper_parallel.platform.mindspore.activation_checkpoint.checkpointing import (
    checkpoint,
    framework_checkpoint,
    noop_context_fn,
    swap,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.marks import swap_tensor_wrapper
from hyper_parallel.platform.mindspore.activation_checkpoint.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.platform.mindspore.activation_checkpoint.selective import create_selective_checkpoint_contexts
from hyper_parallel.platform.mindspore.activation_checkpoint.simulation import simulate
from hyper_parallel.platform.mindspore.activation_checkpoint.tensor_border import MindSporeTensorBorder
from hyper_parallel.platform.mindspore.activation_checkpoint.wrappers import (
    ActivationWrapper,
    CheckpointWrapper,
    FuncCell,
    SwapWrapper,
    checkpoint_wrapper,
    swap_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "CheckpointWrapper",
    "FuncCell",
    "SwapWrapper",
    "base_check_fn",
    "checkpoint",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "framework_checkpoint",
    "noop_context_fn",
    "simulate",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
    "tensor_border",
]

tensor_border = MindSporeTensorBorder()
