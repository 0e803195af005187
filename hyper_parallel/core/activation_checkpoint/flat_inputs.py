"""A region's arguments with their tensors laid out flat.

The frameworks' checkpoints save the tensors among the positional arguments only. Those in keywords and inside lists, dicts
or dataclasses would be held by a closure: they would never leave the device, no change of them would be noticed, and a
replay would find containers as forward left them. So tensors are passed by position and put back inside.

What lives until backward is :class:`Reassembled`. It must not hold the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any, Final

from hyper_parallel.core.trees import tree_map

__all__ = ["FlatInputs", "Reassembled", "RegionCall", "needs_layout"]

_COPIED_ITERATORS: Final = frozenset(
    {type(iter([])), type(iter(())), type(iter(range(0))), type(iter(range(1 << 70))), type(iter("")), type(iter(b"")),
     type(reversed([])), type(iter(set())), type(iter({})), type(iter({}.values())), type(iter({}.items()))}
)  # fmt: skip
"""Iterators whose copy continues from the same place. A copy of ``zip`` or ``map`` shares what it reads from."""


def needs_layout(values: Any, is_tensor: Callable[[Any], bool], *, takes_tensors: bool) -> bool:
    """Whether a value is more than a plain one: a container or an iterator; with ``takes_tensors``, also a tensor."""
    for value in values:
        if value is None or isinstance(value, int | float | str):
            continue
        if is_tensor(value):
            if takes_tensors:
                return True
        elif isinstance(value, list | tuple | dict | set | frozenset | Iterator) or dataclasses.is_dataclass(value):
            return True
    return False


class RegionCall:
    """One call of a region, laid out for a framework's checkpoint: ``function(*args, **kwargs)`` is what it runs."""

    def __init__(
        self,
        where: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        *,
        is_tensor: Callable[[Any], bool],
        is_flat: bool,
    ) -> None:
        self.where = where
        self.region = function  # the user's own
        self.function: Callable[..., Any]
        self.args: Any
        if (
            is_flat
            or needs_layout(args, is_tensor, takes_tensors=False)
            or needs_layout(kwargs.values(), is_tensor, takes_tensors=True)
        ):
            inputs = FlatInputs(function, args, kwargs, is_tensor=is_tensor, where=where)
            self.function, self.args, self.kwargs = inputs.call, tuple(inputs.tensors), {}
            self.objects = inputs.others  # those among the arguments that may have a state
        else:
            self.function, self.args, self.kwargs = function, tuple(args), kwargs
            self.objects = [value for value in (*args, *kwargs.values()) if not is_tensor(value)]

    def take_objects(self) -> list[Any]:
        """The objects among the arguments, which nothing here holds from now on."""
        objects, self.objects = self.objects, []
        return objects

    def take_args(self) -> Any:
        """The positional arguments, which nothing here holds from now on."""
        args, self.args = self.args, ()
        return args


class FlatInputs:
    """One call: ``call(*tensors)`` does what ``function(*args, **kwargs)`` would."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        *,
        is_tensor: Callable[[Any], bool],
        where: str,
    ) -> None:
        self.tensors: list[Any] = []
        self.others: list[Any] = []  # the leaves that are no tensors
        self._is_tensor = is_tensor
        self._where = where
        given = tuple(args), kwargs
        self.call = Reassembled(function, given, tree_map(self._take, given))

    def _take(self, leaf: Any) -> Any:
        if self._is_tensor(leaf):
            self.tensors.append(leaf)
            return _TensorAt(len(self.tensors) - 1)
        if isinstance(leaf, Iterator) and not isinstance(leaf, io.IOBase) and not hasattr(leaf, "__dict__"):
            return self._copied(leaf)
        self.others.append(leaf)
        return leaf

    def _copied(self, iterator: Any) -> Any:
        if type(iterator) in _COPIED_ITERATORS:
            return _IteratorAt(copy.copy(iterator))
        raise TypeError(
            f"{self._where}: cannot take a {type(iterator).__name__} as an argument, because the replay would find it used up "
            "by forward and would compute other values. Pass a list or a tuple of what it gives."
        )


class Reassembled:
    """The function, called with the tensors put back where they were.

    Forward gets the caller's own objects: a list that the function fills is read by the caller afterwards. A replay gets
    them as they were when forward began.
    """

    def __init__(self, function: Callable[..., Any], given: Any, tree: Any) -> None:
        self.function = function
        self._given = given
        self._tree = tree

    def __call__(self, *tensors: Any) -> Any:
        """Run the function: the first call is forward, every other a replay."""
        given, self._given = self._given, None
        if given is not None:
            args, kwargs = given
            del given
            return self.function(*args, **kwargs)

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, _TensorAt):
                return tensors[leaf.index]
            return copy.copy(leaf.iterator) if isinstance(leaf, _IteratorAt) else leaf

        args, kwargs = tree_map(value_of, self._tree)
        return self.function(*args, **kwargs)


class _TensorAt:
    """Stands for a tensor in a tree."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _IteratorAt:
    """Stands for an iterator in a tree, which goes on from where it was when forward began."""

    __slots__ = ("iterator",)

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
