"""What autograd holds instead of a saved tensor.

A :class:`SwappedValue` is a record and the view to make of it; a :class:`KeptValue` is an alias of a value that stays. Both
remember the version they saw, because the framework's own in-place check is off under hooks. Neither knows when it is
needed. They live as long as the graph that holds them, and nothing else ends their life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, Tensor, TensorAdapter, View
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["KeptValue", "Packed", "Scope", "SwappedValue", "map_packed", "packed_in", "raise_changed"]


class Scope:
    """Where a value was saved: the framework, and the words with which errors begin."""

    __slots__ = ("tensors", "where")

    def __init__(self, tensors: TensorAdapter, where: str) -> None:
        self.tensors = tensors
        self.where = where


def raise_changed(scope: Scope, *, shape: Any, dtype: Any, version: int, now: int) -> NoReturn:
    """Raise the error of a value that was changed between its save and its use."""
    raise InPlaceChangeError(
        f"{scope.where}: a saved tensor {tuple(shape)} {dtype}{scope.tensors.wanted_by()} was changed in place after it was "
        f"saved (saved at version {version}, now at version {now}). Backward would read other values than forward did. "
        "Replace the in-place operation that follows the save by its out-of-place form (x = x + y), or clone the tensor first."
    )


class KeptValue:
    """A value that stays on the device."""

    __slots__ = ("scope", "tensor", "token", "version")

    def __init__(self, tensor: Tensor, token: Any, version: int, scope: Scope) -> None:
        self.tensor = tensor  # an alias, never the saved tensor itself
        self.token = token  # a VersionToken; the alias itself where it shares the counter
        self.version = version
        self.scope = scope

    @classmethod
    def of(cls, tensor: Tensor, scope: Scope) -> KeptValue:
        """Keep an alias of ``tensor``."""
        held, token = scope.tensors.held_alias(tensor)
        return cls(held, token, tensor._version, scope)

    def storage_key(self) -> int | None:
        """Names the storage of the value; None for a tensor without one."""
        return self.scope.tensors.storage_key_if_any(self.tensor)

    def unpack(self) -> Tensor:
        """The value. Raises if it was changed since it was saved."""
        now = self.token._version
        if now != self.version:
            tensor = self.tensor
            raise_changed(self.scope, shape=tensor.shape, dtype=tensor.dtype, version=self.version, now=now)
        return self.tensor


class SwappedValue:
    """A value whose bytes a record keeps, wherever they are."""

    __slots__ = ("record", "scope", "token", "version", "view")

    def __init__(self, record: Record, view: View, *, token: Any, version: int, scope: Scope) -> None:
        self.record = record
        self.view = view
        self.token = token  # a VersionToken
        self.version = version
        self.scope = scope

    def storage_key(self) -> int | None:
        """Names the storage of the source while that lives."""
        return self.record.storage_key

    def _check_unchanged(self) -> None:
        now = self.token._version
        if now != self.version:
            view = self.view
            raise_changed(self.scope, shape=view.size, dtype=view.dtype, version=self.version, now=now)

    def _fetch(self, token: Any = None) -> Tensor:
        record, tensors = self.record, self.scope.tensors
        device_bytes: FlatBytes = record.engine.fetch(record, tensors.current_task(record.position))
        return tensors.view_for_backward(self.view, device_bytes, self.scope, token, record.storage_key)

    def unpack(self) -> Tensor:
        """The exact view, on the device, ordered for the current stream. Repeatable. Raises where the plain step would."""
        self._check_unchanged()
        return self._fetch(self.token)

    def unpack_value(self, *, checks_version: bool) -> Tensor:
        """The same for a value that the framework would recompute: a later change of the source is no fault.

        The far copy still holds the value when it was ordered before the change. Otherwise it may not, and this raises.
        """
        if checks_version and not self.record.snapshot_is_exact:
            self._check_unchanged()
        return self._fetch()


Packed: TypeAlias = KeptValue | SwappedValue


def map_packed(packed: Any, fn: Callable[[Packed], Any]) -> Any:
    """The same structure with ``fn`` of every packed value in it."""
    if isinstance(packed, KeptValue | SwappedValue):
        return fn(packed)
    if isinstance(packed, tuple | list):
        return type(packed)(map_packed(item, fn) for item in packed)
    return packed


def packed_in(packed: Any) -> list[Packed]:
    """The packed values in an op's packed output."""
    if isinstance(packed, KeptValue | SwappedValue):
        return [packed]
    if isinstance(packed, tuple | list):
        return [leaf for item in packed for leaf in packed_in(item)]
    return []
