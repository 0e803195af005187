"""Declared orders of layers: which group a layer has, and which groups come before and after it.

What a layer knows of this is derived from its identity. ``_swap_group_name`` and ``_swap_group_order`` are written on a
declared layer for code that drives its group by hand; a deepcopy or a pickle of the layer finds them empty, because the
copy was never declared.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.swap import SwapGroup

__all__ = ["Chain", "DeclaredLayers"]


class Chain:
    """A declared order of two layers. A hint; ``remove()`` takes it back."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Forget the declaration."""
        if self._remove is not None:
            self._remove()
            self._remove = None


class _GroupName(str):
    """The name of a layer's group; empty in a copy of the layer."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, ()


class _GroupOrder(dict[str, str | None]):
    """The names of the groups before and after; empty in a copy of the layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()


class DeclaredLayers:
    """The declared layers of this process, held weakly."""

    def __init__(self, groups: dict[str, SwapGroup], make_group: Callable[[str], SwapGroup]) -> None:
        self._lock = threading.RLock()
        self._groups = groups
        self._make_group = make_group
        self._group_of: weakref.WeakKeyDictionary[Any, SwapGroup] = weakref.WeakKeyDictionary()
        self._chains: dict[tuple[int, int], Chain] = {}
        self._count = 0

    def group_of(self, layer: Any) -> SwapGroup | None:
        """The group of a declared layer."""
        return self._group_of.get(layer)

    def declare(self, first_layer: Any, second_layer: Any, watch: Callable[[Iterable[Any]], list[Any]]) -> Chain:
        """``second_layer`` runs after ``first_layer``; the same chain if that is known already."""
        key = (id(first_layer), id(second_layer))
        with self._lock:
            known = self._chains.get(key)
            if known is not None:
                return known
            first, second = self._group_for(first_layer), self._group_for(second_layer)
            second.before = first
            self._update()
            handles = watch((first_layer, second_layer))
            chain = self._chains[key] = Chain(lambda: self._unchain(key, first, second, handles))
            for layer in (first_layer, second_layer):
                weakref.finalize(layer, self._chains.pop, key, None)
            return chain

    def clear(self) -> None:
        """Take every declaration back."""
        for chain in list(self._chains.values()):
            chain.remove()
        for layer in list(self._group_of):
            vars(layer).pop("_swap_group_name", None)
            vars(layer).pop("_swap_group_order", None)

    def _group_for(self, layer: Any) -> SwapGroup:
        group = self._group_of.get(layer)
        if group is None:
            while (name := f"swap_group_{self._count}") in self._groups:
                self._count += 1
            self._count += 1
            group = self._group_of[layer] = self._make_group(name)
            vars(layer)["_swap_group_name"] = _GroupName(name)
            weakref.finalize(layer, self._groups.pop, name, None)
        return group

    def _update(self) -> None:
        """Find the ends of all chains (a group that follows another and that none follows), and tell the layers."""
        groups = list(self._groups.values())
        after = {id(group.before): group for group in groups if group.before is not None}
        for group in groups:
            group.is_last_group = group.before is not None and id(group) not in after
        for layer, group in list(self._group_of.items()):
            behind = after.get(id(group))
            vars(layer)["_swap_group_order"] = _GroupOrder(
                prev=None if group.before is None else group.before.group_name,
                next=None if behind is None else behind.group_name,
            )

    def _unchain(self, key: tuple[int, int], first: SwapGroup, second: SwapGroup, handles: Iterable[Any]) -> None:
        with self._lock:
            self._chains.pop(key, None)
            if second.before is first:
                second.before = None
            self._update()
            for handle in handles:
                handle.remove()
