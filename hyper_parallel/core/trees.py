"""Walking the containers that models take and return. Pure Python; knows no framework.

Every container comes back as its own type, with whatever else it carries: the default factory of a ``defaultdict``, the
attributes of a ``dict`` or ``list`` subclass, the fields of a frozen dataclass that are not in its constructor.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Final

__all__ = ["tree_map"]

PACKED_SEQUENCE_FIELDS: Final = ("data", "batch_sizes", "sorted_indices", "unsorted_indices")


def tree_map(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] = lambda item: False) -> Any:
    """Apply ``fn`` to every leaf of ``tree``; a leaf is what ``is_leaf`` says, and all but the containers below."""
    if is_leaf(tree):
        return fn(tree)
    if isinstance(tree, dict):
        return _map_dict(fn, tree, is_leaf)
    if isinstance(tree, tuple):
        return _map_tuple(fn, tree, is_leaf)
    if isinstance(tree, list):
        clone = copy.copy(tree)
        clone[:] = [tree_map(fn, item, is_leaf) for item in tree]
        return clone
    if isinstance(tree, set | frozenset):
        return type(tree)(tree_map(fn, item, is_leaf) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree, is_leaf)
    return fn(tree)


def _map_dict(fn: Callable[[Any], Any], tree: dict[Any, Any], is_leaf: Callable[[Any], bool]) -> dict[Any, Any]:
    mapped = [(key, tree_map(fn, value, is_leaf)) for key, value in tree.items()]
    clone = copy.copy(tree)
    for key, value in mapped:
        clone[key] = value
    return clone


def _map_tuple(fn: Callable[[Any], Any], tree: tuple[Any, ...], is_leaf: Callable[[Any], bool]) -> Any:
    names = getattr(tree, "_fields", None)
    if names == PACKED_SEQUENCE_FIELDS:
        return _map_packed_sequence(fn, tree)
    mapped = [tree_map(fn, item, is_leaf) for item in tree]
    # A named tuple's subclass may take other arguments than its fields; `_make` goes around its constructor.
    make: Callable[[list[Any]], Any] = type(tree)._make if names is not None else type(tree)  # type: ignore[attr-defined]
    return make(mapped)


def _map_packed_sequence(fn: Callable[[Any], Any], packed: Any) -> Any:
    """Apply ``fn`` to the data alone: the other fields say where rows lie, and arithmetic on them would break it.

    ``batch_sizes`` lives on the host by contract; the two index tensors follow the data to its device.
    """
    data = fn(packed.data)
    device = getattr(data, "device", None)

    def follow(index: Any) -> Any:
        return index if index is None or device is None or index.device == device else index.to(device)

    return type(packed)._make(
        (data, packed.batch_sizes, follow(packed.sorted_indices), follow(packed.unsorted_indices))
    )


def _map_dataclass(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    # dataclasses.replace would run __post_init__ again and refuse fields that are not in the constructor.
    cls: Any = type(tree)
    clone = cls.__new__(cls)
    if hasattr(tree, "__dict__"):
        clone.__dict__.update(tree.__dict__)
    for field in dataclasses.fields(tree):
        if hasattr(tree, field.name):
            object.__setattr__(clone, field.name, tree_map(fn, getattr(tree, field.name), is_leaf))
    return clone
