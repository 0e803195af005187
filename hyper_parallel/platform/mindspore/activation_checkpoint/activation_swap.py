"""The older import path of the swap wrappers; the same names as in the package."""

from hyper_parallel.backends.mindspore import (
    ActivationWrapper,
    AsyncSaveOnCpu,
    FuncCell,
    SwapWrapper,
    base_check_fn,
    swap_tensor_wrapper,
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
