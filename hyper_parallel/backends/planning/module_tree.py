"""How modules lie in one another: what finding and replacing blocks needs of a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

__all__ = ["BlockRef", "Module", "ModuleLocation", "ModuleTree", "structure_of"]

Module: TypeAlias = Any  # torch.nn.Module | mindspore.nn.Cell


class ModuleTree(Protocol):
    """A framework's modules."""

    class_name: str  # of the framework's class of modules

    @property
    def containers(self) -> tuple[type, ...]:
        """The classes that hold modules in order or by name."""

    @property
    def wrapper_class(self) -> type:
        """The base of our wrappers."""

    def named(self, module: Module) -> Iterable[tuple[str, Module]]:
        """The module under the path "", and every module inside it, each once."""

    def children(self, module: Module) -> dict[str, Module | None]:
        """The module's own table of its children."""

    def put_child(self, module: Module, key: str, child: Module) -> None:
        """Put a module in the place of a child; checks of the module's class are not run."""

    def parameters(self, module: Module) -> Iterable[Any]:
        """All parameters in it."""

    def named_parameters(self, module: Module) -> Iterable[tuple[str, Any]]:
        """The same with their paths."""

    def has_forward(self, module: Module) -> bool:
        """False for what only holds modules: it is never called, so it cannot be a region."""

    def refuse_own_checkpointing(self, model: Module, who: str) -> None:
        """Raise where a module recomputes its parts on its own."""


@dataclasses.dataclass(frozen=True)
class BlockRef:
    """One block: its path from the root and the module."""

    name: str
    module: Module


@dataclasses.dataclass(frozen=True)
class ModuleLocation:
    """Where a module is in the tree: its parent, and the name it has there."""

    tree: ModuleTree
    parent: Module
    key: str

    def put(self, module: Module) -> None:
        """Put another module there; the container's own checks are not run."""
        self.tree.put_child(self.parent, self.key, module)

    def get(self) -> Module | None:
        """The module that is there now."""
        return self.tree.children(self.parent).get(self.key)


def structure_of(tree: ModuleTree, module: Module) -> tuple[Any, ...]:
    """The class and the shapes of the parameters: what blocks of one kind have in common."""
    return module.__class__, tuple(tuple(parameter.shape) for parameter in tree.parameters(module))
