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

import collections
import functools
import random
import types
from collections.abc import Iterable
from typing import Any, Final

import mindspore
import numpy as np
from mindspore import nn

from hyper_parallel.backends.mindspore.devices import copied
from hyper_parallel.backends.mindspore.storages import storage_key, unseen
from hyper_parallel.core.activation_checkpoint.python_state import RandomSource, objects_in
from hyper_parallel.core.activation_checkpoint.region_state import Place, RegionStateBase
from hyper_parallel.platform.mindspore import compat

__all__ = ["RegionState"]

_COPIED_BYTES: Final = 16 << 20  # of the state of cells, per call of a region
_SMALL_BYTES: Final = 64 << 10  # a buffer of this size is copied whether or not forward writes it

_RANDOM_SOURCES: Final = (random.Random, np.random.Generator, np.random.RandomState)
_NOTED_KINDS: Final = frozenset(
    {mindspore.Tensor, types.FunctionType, list, dict, set, collections.deque, mindspore.Generator, *_RANDOM_SOURCES}
)
_LEFT_ALONE: Final = frozenset({"mindspore", "hyper_parallel"})
"""Objects of these packages, such as primitives, have no state that forward reads."""


@functools.cache
def _names_of_mindspore() -> frozenset[str]:
    """The names that every cell has. MindSpore fills some of them when a cell is first called, and counts on them."""
    return frozenset(vars(nn.Cell()))


class _Generator:
    """``mindspore.Generator``."""

    def read(self, source: Any) -> Any:
        with unseen():
            return source.get_state()

    def write(self, source: Any, state: Any) -> None:
        with unseen():
            source.set_state(state)

    def is_same(self, one: Any, two: Any) -> bool:
        return bool(one.asnumpy().tobytes() == two.asnumpy().tobytes())


_GENERATOR: Final = _Generator()


class RegionState(RegionStateBase):
    """The state of one call of a region."""

    def __init__(self, where: str, function: Any, arguments: Iterable[Any], *, keeps_random_state: bool = True) -> None:
        super().__init__(where, function, arguments, keeps_random_state=keeps_random_state)
        self._left: list[tuple[Place, tuple[int, int]]] = []  # what has no stand-in, as forward left it

    def _is_module(self, value: Any) -> bool:
        return isinstance(value, nn.Cell)

    def _children(self, module: Any) -> Iterable[Any]:
        return module._cells.values()  # type: ignore[no-any-return]

    def _take_tensor(self, value: Any) -> bool:
        return isinstance(value, mindspore.Tensor)

    def _random_source_of(self, value: Any) -> RandomSource | None:
        return _GENERATOR if isinstance(value, mindspore.Generator) else None

    def _is_left_alone(self, value: Any) -> bool:
        return type(value).__module__.split(".")[0] in _LEFT_ALONE

    def _is_managed(self, tensor: Any) -> bool:
        return False

    def _copied(self, tensor: Any, place: Place) -> Any:
        copy = copied(tensor)
        if not isinstance(place.tensor, mindspore.Parameter):
            return copy
        with unseen():
            return mindspore.Parameter(copy, name=place.tensor.name, requires_grad=False)

    # ------------------------------------------------------------------ forward

    def __enter__(self) -> None:
        """Forward begins."""
        super().__enter__()
        left = _COPIED_BYTES
        for place in self._places:
            nbytes = place.tensor.nbytes
            if 0 < nbytes <= left and _is_copied_first(place, nbytes):
                left -= nbytes
                place.bytes_before = self._copied(place.tensor, place)

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

    def _note_module(self, module: Any) -> None:
        is_wrapper = bool(self._behind(module))
        if not is_wrapper:
            self._flags.append((module, module.training))
        if not type(module).__module__.startswith("mindspore."):  # whose classes write no attribute in forward
            self._note_attributes(module)
        for places in () if is_wrapper else (module._params, module._buffers):
            for key, value in places.items():
                if isinstance(value, mindspore.Tensor):
                    self._places.append(Place(module, places, key, value))

    def _note_attributes(self, module: Any) -> None:
        names, left_out = module.__dict__, _names_of_mindspore()
        self._python.note_names(names, left_out=left_out)
        for key, value in names.items():
            kind = type(value)
            if kind not in _NOTED_KINDS or key in left_out:
                continue
            if kind is mindspore.Tensor:
                self._places.append(Place(module, names, key, value))
            elif kind is types.FunctionType:
                self._note(objects_in(value, self._is_module))
            elif kind is mindspore.Generator or kind in _RANDOM_SOURCES:
                self._note((value,))
            else:
                self._note_items(value)


def _mark_of(tensor: Any) -> tuple[int, int]:
    return tensor._version, storage_key(tensor)


def _is_state(place: Place) -> bool:
    """Whether a stand-in may take the place: nobody asks for its gradient."""
    tensor = place.tensor
    return not tensor.requires_grad if isinstance(tensor, mindspore.Parameter) else not tensor._requires_grad


def _is_copied_first(place: Place, nbytes: int) -> bool:
    """Whether the bytes are copied before it is known that forward writes them."""
    if not _is_state(place):
        return False
    if isinstance(place.tensor, mindspore.Parameter):
        return isinstance(place.owner, compat.normalisation_cells())
    return nbytes <= _SMALL_BYTES
