"""What a recomputed region reads beside its inputs, so that a replay of the user's Python reads the same.

MindSpore's own recompute takes for granted that cells, random sources and objects are in backward what they were in forward.
Where they are not, it computes other values and says nothing. Here, for one call of a region:

1. **Parameters and buffers by place.** The tensors that a cell holds when forward begins are the ones that the replay gets,
   also where another parameter has taken the place since then.
2. **State that forward writes.** MindSpore counts no change by ``assign``, so that a write is known in two ways. What a
   normalisation cell keeps, and small buffers and tensor attributes, are copied when forward begins. Buffers and parameters
   that are not trained are copied when a dispatch mode of ours sees the first op that writes them. The replay works on a
   copy of that copy, so that the state changes once. A trained parameter has no stand-in, because its gradient would go to
   the stand-in.
3. **What was changed after forward** and has no stand-in shows in its version (``copy_``) or its address (``set_data``). A
   replay under a dispatch mode of ours raises at the first op that reads it. A replay that does not read it is right.
4. **Python state and random sources**: see :mod:`hyper_parallel.core.activation_checkpoint.python_state`. The streams of
   ``random`` and numpy are left to :mod:`.draws`.

What is not seen is listed in ``docs/mindspore.md``.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from typing import Any

import mindspore
import numpy as np
from mindspore import nn

from hyper_parallel.backends.mindspore.devices import copied
from hyper_parallel.backends.mindspore.storages import storage_key, unseen
from hyper_parallel.core.activation_checkpoint.region_state import SMALL_BYTES, GeneratorSource, Place, RegionStateBase
from hyper_parallel.platform.mindspore import compat

__all__ = ["RegionState"]


@functools.cache
def _names_of_mindspore() -> frozenset[str]:
    """The names that every cell has. MindSpore fills some of them when a cell is first called, and counts on them."""
    return frozenset(vars(nn.Cell()))


def _have_equal_bytes(one: Any, two: Any) -> bool:
    return bool(one.asnumpy().tobytes() == two.asnumpy().tobytes())


class RegionState(RegionStateBase):
    """The state of one call of a region."""

    def __init__(self, where: str, function: Any, arguments: Iterable[Any], *, keeps_random_state: bool = True) -> None:
        super().__init__(where, function, arguments, keeps_random_state=keeps_random_state)
        self._left: list[tuple[Place, tuple[int, int]]] = []  # what has no stand-in, as forward left it

    module_class = nn.Cell
    tensor_class = mindspore.Tensor
    generator_class = mindspore.Generator
    generators = GeneratorSource(unseen, _have_equal_bytes)
    random_classes = (random.Random, np.random.Generator, np.random.RandomState)
    packages_left_alone = frozenset({"mindspore", "hyper_parallel"})  # such as primitives
    packages_without_state = "mindspore."

    def _children(self, module: Any) -> Iterable[Any]:
        return module._cells.values()  # type: ignore[no-any-return]

    def _tables(self, module: Any) -> Iterable[dict[str, Any]]:
        return module._params, module._buffers

    def _framework_names(self) -> frozenset[str]:
        return _names_of_mindspore()

    _names_left_out = _framework_names

    def _has_place(self, value: Any) -> bool:
        return isinstance(value, mindspore.Tensor)

    def _is_copied_first(self, place: Place) -> bool:
        if not _is_state(place):
            return False
        if isinstance(place.tensor, mindspore.Parameter):
            return isinstance(place.owner, compat.normalisation_cells())
        return bool(place.tensor.nbytes <= SMALL_BYTES)

    def _copied(self, tensor: Any, place: Place) -> Any:
        copy = copied(tensor)
        if not isinstance(place.tensor, mindspore.Parameter):
            return copy
        with unseen():
            return mindspore.Parameter(copy, name=place.tensor.name, requires_grad=False)

    # ------------------------------------------------------------------ forward

    def __exit__(self, *exc: object) -> None:
        """Forward has ended."""
        super().__exit__(*exc)
        self._left = [(place, _mark_of(place.tensor)) for place in self._places if place.bytes_before is None]

    def before_write(self, tensor: Any) -> None:
        """An op of forward is about to write a tensor: rule 2."""
        key = storage_key(tensor)
        for place in self._places:
            if place.bytes_before is None and _is_state(place) and storage_key(place.tensor) == key:
                place.bytes_before = self._copied(place.tensor, place)

    def changed(self) -> dict[int, str]:
        """What was changed after forward and has no stand-in, by address: rule 3."""
        found = {}
        for place, mark in self._left:
            if _mark_of(place.tensor) != mark:
                kind = "parameter" if isinstance(place.tensor, mindspore.Parameter) else "buffer"
                found[storage_key(place.tensor)] = place.label(kind)
        return found


def _mark_of(tensor: Any) -> tuple[int, int]:
    return tensor._version, storage_key(tensor)


def _is_state(place: Place) -> bool:
    """Whether a stand-in may take the place: no gradient is asked for it."""
    tensor = place.tensor
    return not tensor.requires_grad if isinstance(tensor, mindspore.Parameter) else not tensor._requires_grad
