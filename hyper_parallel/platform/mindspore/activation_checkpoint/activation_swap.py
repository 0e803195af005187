"""The older import path of the swap wrappers; the same names as in the package."""

from hyper_parallel.platform.mindspore.activation_checkpoint.marks import swap_tensor_wrapper
from hyper_parallel.platform.mindspore.activation_checkpoint.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.platform.mindspore.activation_checkpoint.wrappers import (
    ActivationWrapper,
    FuncCell,
    SwapWrapper,
    swap_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "FuncCell",
    "SwapWrapper",
    "base_check_fn",
    "swap_tensor_wrapper",
    "swap_wrapper",
]
