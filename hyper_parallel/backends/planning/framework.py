"""What applying rules and plans needs of a framework, beside its tree of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hyper_parallel.backends.planning.module_tree import Module, ModuleTree
from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange

__all__ = ["Framework"]


class Framework(Protocol):
    """One framework. There is one object of each, which regions hold on their class, so that they can be pickled."""

    @property
    def tree(self) -> ModuleTree:
        """How modules lie in one another."""

    def is_recording(self) -> bool:
        """Whether autograd records what this thread runs."""

    def is_in_backward(self) -> bool:
        """Whether this thread runs inside a backward."""

    def is_compiling(self) -> bool:
        """Whether a compiler traces this call."""

    def is_tensor(self, value: Any) -> bool:
        """Whether it is a tensor."""

    def dtype_name(self, tensor: Any) -> str:
        """``float32``."""

    def forward_of(self, module: Module) -> Callable[..., Any]:
        """The method that a call of the module reaches."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``hp.checkpoint`` of the framework."""

    def swap(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``hp.swap`` of the framework."""

    def op_name(self, op: Any) -> str:
        """How rules and plans name an op."""

    def op_overload(self, op: Any) -> str:
        """Which form of it; empty where an op has one form."""

    def known_ops(self) -> list[str] | None:
        """The names of all ops; None where only a step shows them."""

    def wrapped(self, module: Module, checkpoint_fn: Callable[..., Any]) -> Module:
        """A wrapper whose calls go through ``checkpoint_fn``."""

    def refuse_compiled(self, path: str, module: Module, *, may_be_whole: bool = False) -> None:
        """Raise where single ops of the module cannot be seen. ``may_be_whole``: only where a part of it is compiled."""

    def is_compiled_whole(self, module: Module) -> bool:
        """Whether a region on this module goes into the module's own graph."""

    def set_predicted(self, predicted: MemoryChange | None) -> None:
        """Let the line about the first step name what a plan predicts."""
