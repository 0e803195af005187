"""The import path that the interface names; the code is in ``hyper_parallel.backends.torch``."""

from hyper_parallel.backends.torch import (
    ActivationPolicy,
    ActivationWrapper,
    AsyncSaveOnCpu,
    CheckpointWrapper,
    FuncModule,
    SwapWrapper,
    base_check_fn,
    checkpoint,
    checkpoint_wrapper,
    create_selective_checkpoint_contexts,
    framework_checkpoint,
    noop_context_fn,
    simulate,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)

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
]
