"""Activation memory on MindSpore: hooks, selective regions, wrappers. The schedule itself is in ``core``."""

from hyper_parallel.backends.mindspore.checkpointing import (
    checkpoint,
    framework_checkpoint,
    noop_context_fn,
    swap,
)
from hyper_parallel.backends.mindspore.marks import swap_tensor_wrapper
from hyper_parallel.backends.mindspore.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.backends.mindspore.selective import create_selective_checkpoint_contexts
from hyper_parallel.backends.mindspore.simulation import simulate
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS as tensor_adapter
from hyper_parallel.backends.mindspore.wrappers import (
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
    "tensor_adapter",
]
