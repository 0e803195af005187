"""The older import path of the swap wrappers; the same names as in the package."""

from hyper_parallel.platform.torch.activation_checkpoint.marks import swap_tensor_wrapper
from hyper_parallel.platform.torch.activation_checkpoint.saved_tensors import (
    ActivationPolicy,
    AsyncSaveOnCpu,
    base_check_fn,
)
from hyper_parallel.platform.torch.activation_checkpoint.wrappers import (
    ActivationWrapper,
    FuncModule,
    SwapWrapper,
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
