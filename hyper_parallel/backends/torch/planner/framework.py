"""Torch, as applying rules and plans sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch.checkpointing import checkpoint, swap
from hyper_parallel.backends.torch.first_step import set_predicted
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.op_names import op_name, op_overload
from hyper_parallel.backends.torch.planner.blocks import TREE
from hyper_parallel.backends.torch.planner.compiled import refuse_compiled
from hyper_parallel.backends.torch.wrappers import CheckpointWrapper
from hyper_parallel.platform.torch import compat

__all__ = ["TORCH"]


class TorchFramework:
    """See :class:`~hyper_parallel.backends.planning.framework.Framework`."""

    tree = TREE
    is_recording = staticmethod(torch.is_grad_enabled)
    is_in_backward = staticmethod(is_in_backward)
    is_compiling = staticmethod(torch.compiler.is_compiling)
    is_tensor = staticmethod(torch.is_tensor)
    checkpoint = staticmethod(checkpoint)
    swap = staticmethod(swap)
    op_name = staticmethod(op_name)
    op_overload = staticmethod(op_overload)
    refuse_compiled = staticmethod(refuse_compiled)
    set_predicted = staticmethod(set_predicted)

    def dtype_name(self, tensor: torch.Tensor) -> str:
        """See the protocol."""
        return str(tensor.dtype).removeprefix("torch.")

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """See the protocol."""
        return module.forward

    def is_compiled_whole(self, module: nn.Module) -> bool:
        """See the protocol."""
        return compat.compiler_of(module) is not None

    def known_ops(self) -> list[str]:
        """See the protocol."""
        names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
        return sorted(names)

    def wrapped(self, module: nn.Module, checkpoint_fn: Callable[..., Any]) -> nn.Module:
        """See the protocol."""
        return CheckpointWrapper(module, checkpoint_fn)


TORCH: Final = TorchFramework()
