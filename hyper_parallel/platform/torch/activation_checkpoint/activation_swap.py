"""The older import path of the swap wrappers; the same names as in the package."""

from hyper_parallel.backends.torch import (
    ActivationPolicy,
    ActivationWrapper,
    AsyncSaveOnCpu,
    FuncModule,
    SwapWrapper,
    base_check_fn,
    swap_tensor_wrapper,
    swap_wrapper,
)

__all__ = [
    "ActivationPolicy",
    "ActivationWrapper",
    "AsyncSaveOnCpu",
    "FuncModule",
    "SwapWrapper",
    "base_check_fn",
    "swap_tensor_wrapper",
    "swap_wrapper",
]
