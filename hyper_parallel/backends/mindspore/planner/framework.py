"""MindSpore, as applying rules and plans sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import mindspore

from hyper_parallel.backends.mindspore.checkpointing import checkpoint, swap
from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.planner.blocks import TREE
from hyper_parallel.backends.mindspore.wrappers import CheckpointWrapper
from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.mindspore import compat

__all__ = ["MINDSPORE"]


class MindSporeFramework:
    """See :class:`~hyper_parallel.backends.planning.framework.Framework`."""

    tree = TREE
    is_recording = staticmethod(compat.is_recording)
    is_in_backward = staticmethod(is_in_backward)
    checkpoint = staticmethod(checkpoint)
    swap = staticmethod(swap)

    def is_compiling(self) -> bool:
        """Never: a region is refused in a graph."""
        return False

    def is_tensor(self, value: Any) -> bool:
        """See the protocol."""
        return isinstance(value, mindspore.Tensor)

    def dtype_name(self, tensor: Any) -> str:
        """See the protocol."""
        return str(tensor.dtype).lower()

    def forward_of(self, module: Any) -> Callable[..., Any]:
        """See the protocol."""
        return module.construct  # type: ignore[no-any-return]

    def op_name(self, op: Any) -> str:
        """See the protocol."""
        return str(op.name)

    def op_overload(self, op: Any) -> str:
        """See the protocol. An op of MindSpore has one form."""
        return ""

    def known_ops(self) -> None:
        """See the protocol."""
        return

    def wrapped(self, module: Any, checkpoint_fn: Callable[..., Any]) -> Any:
        """See the protocol."""
        return CheckpointWrapper(module, checkpoint_fn)

    def is_compiled_whole(self, module: Any) -> bool:
        """Never: a region is refused in a graph."""
        return False

    def refuse_compiled(self, path: str, module: Any, *, may_be_whole: bool = False) -> None:
        """See the protocol. A jitted cell is one op to a dispatch mode, and MindSpore does not show it to one."""
        for inner, cell in TREE.named(module):
            construct = cell.__dict__.get("construct", type(cell).construct)
            if getattr(construct, "__wrapped_by_jit__", False):
                where = f"{path}.{inner}" if inner else path
                raise PlanError(
                    f"{path}: cannot follow a plan or rules, because {where} is compiled (mindspore.jit), and compiled code does "
                    "not show its single ops. The model is as it was. Give the model before its blocks are compiled, or treat "
                    "the compiled blocks as a whole: hp.checkpoint_wrapper(block, swap_inputs=True), hp.swap_wrapper(block)."
                )

    def set_predicted(self, predicted: MemoryChange | None) -> None:
        """See the protocol."""
        SwapManager().first_step.predicted = predicted


MINDSPORE: Final = MindSporeFramework()
