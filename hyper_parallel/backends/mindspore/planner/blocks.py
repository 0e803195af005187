"""MindSpore's cells as planning sees them: which are a model's blocks, and how they lie in one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import mindspore
from mindspore import nn

from hyper_parallel.backends.mindspore.wrappers import ActivationWrapper
from hyper_parallel.backends.planning import blocks
from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.errors import PlanError

__all__ = ["TREE", "device_of", "find_blocks", "require_cell"]


class CellTree:
    """See :class:`~hyper_parallel.backends.planning.module_tree.ModuleTree`."""

    class_name = "mindspore.nn.Cell"
    containers: tuple[type, ...] = (nn.CellList, nn.SequentialCell, nn.CellDict)
    wrapper_class: type = ActivationWrapper

    def named(self, module: Any) -> Iterable[tuple[str, Any]]:
        """See the protocol. ``cells_and_names`` would give a wrapper and the cell in it under one name."""
        return self._named("", module, set())

    def _named(self, path: str, cell: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
        if id(cell) in seen:
            return
        seen.add(id(cell))
        yield path, cell
        for key, child in self.children(cell).items():
            if child is not None:
                yield from self._named(f"{path}.{key}" if path else key, child, seen)

    def children(self, module: Any) -> dict[str, Any]:
        """See the protocol."""
        return module._cells  # type: ignore[no-any-return]

    def put_child(self, module: Any, key: str, child: Any) -> None:
        """See the protocol. A sequential cell keeps a list beside its table."""
        module._cells[key] = child
        if isinstance(module, nn.SequentialCell):
            module.cell_list = list(module._cells.values())

    def parameters(self, module: Any) -> Iterable[Any]:
        """See the protocol."""
        return module.get_parameters()  # type: ignore[no-any-return]

    def named_parameters(self, module: Any) -> Iterable[tuple[str, Any]]:
        """See the protocol. By place: a parameter's own name depends on where its cell was made."""
        for path, cell in self.named(module):
            for key, parameter in cell._params.items():
                if parameter is not None:
                    yield (f"{path}.{key}" if path else key), parameter

    def has_forward(self, module: Any) -> bool:
        """See the protocol. A ``CellList`` and a ``CellDict`` have none."""
        construct = type(module).construct
        return construct not in (nn.Cell.construct, nn.CellList.construct, nn.CellDict.construct)

    def refuse_own_checkpointing(self, model: Any, who: str) -> None:
        """See the protocol."""
        for path, cell in self.named(model):
            if cell.__dict__.get("_recompute_cell") is not None:
                raise PlanError(
                    f"{who}: {path or type(model).__name__} recomputes on its own (Cell.recompute()), which would replay what "
                    "was planned to stay. Leave that call out."
                )


TREE: Final = CellTree()


def require_cell(model: Any, who: str) -> Any:
    """The model, or an error that says what was given instead."""
    if not isinstance(model, nn.Cell):
        raise TypeError(f"{who}: expected a {TREE.class_name}, got {type(model).__name__}")
    return model


def device_of(model: Any, who: str) -> str:
    """The kind of device that the model runs on: ``CPU`` or ``Ascend``."""
    if next(iter(TREE.parameters(model)), None) is None:
        raise PlanError(f"{who}: the model has no parameters, so there is no device whose memory could be planned")
    return str(mindspore.get_context("device_target"))


def find_blocks(
    model: Any,
    patterns: str | Sequence[str] | None,
    *,
    who: str,
    calls: Callable[[], Mapping[str, int]] | None = None,
) -> list[BlockRef]:
    """See :func:`hyper_parallel.backends.planning.blocks.find_blocks`."""
    return blocks.find_blocks(TREE, model, patterns, who=who, calls=calls)
