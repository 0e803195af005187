"""Activation memory on torch: hooks, selective regions, wrappers. The schedule itself is in ``core``."""

from hyper_parallel.backends.torch.checkpointing import (
    checkpoint,
    framework_checkpoint,
    noop_context_fn,
    swap,
)
from hyper_parallel.backends.torch.marks import swap_tensor_wrapper
from hyper_parallel.backends.torch.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.backends.torch.selective import create_selective_checkpoint_contexts
from hyper_parallel.backends.torch.simulation import simulate
from hyper_parallel.backends.torch.tensor_adapter import TENSORS as tensor_adapter
from hyper_parallel.backends.torch.wrappers import (
    ActivationWrapper,
    CheckpointWrapper,
    FuncModule,
    SwapWrapper,
    checkpoint_wrapper,
    swap_wrapper,
)
from hyper_parallel.core.activation_checkpoint.policy import ActivationPolicy

__all__ = [
    "ActivationPolicy",
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "CheckpointWrapper",
    "FuncModule",
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
