"""What autograd holds instead of a saved tensor.

A :class:`SwappedValue` is a record and the source whose view is made of it; a :class:`KeptValue` is an alias of a value that
stays. Both remember the version they saw, because the framework's own in-place check is off under hooks. Neither knows when it
is needed. They live as long as the graph that holds them, and nothing else ends their life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from hyper_parallel.core.activation_checkpoint.adapter import Tensor, TensorAdapter, VersionToken
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.source import Source
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

    __slots__ = ("record", "scope", "source")

    def __init__(self, record: Record, source: Source, scope: Scope) -> None:
        self.record = record
        self.source = source
        self.scope = scope

    @property
    def token(self) -> VersionToken:
        """Shows the version of the tensor that was saved."""
        return self.source

    @property
    def version(self) -> int:
        """Its version when it was saved."""
        return self.source.version

    def storage_key(self) -> int | None:
        """Names the storage of the source while that lives."""
        return self.source.storage_key

    def _raise_changed(self) -> NoReturn:
        source = self.source
        raise_changed(self.scope, shape=source.size, dtype=source.dtype, version=source.version, now=source._version)

    def unpack(self) -> Tensor:
        """The exact view, on the device, ordered for the current stream. Repeatable. Raises where the plain step would."""
        source, record, scope = self.source, self.record, self.scope
        if not source.is_unchanged():
            self._raise_changed()
        tensors = scope.tensors
        device_bytes = record.engine.fetch(record, tensors.current_task(record.position))
        return tensors.view_for_backward(source, device_bytes, scope, counts_changes=True)

    def unpack_value(self, *, checks_version: bool) -> Tensor:
        """The same for a value that the framework would recompute: a later change of the source is no fault.

        The far copy still holds the value when it was ordered before the change. Otherwise it may not, and this raises.
        """
        source, record, scope = self.source, self.record, self.scope
        if checks_version and not record.snapshot_is_exact and not source.is_unchanged():
            self._raise_changed()
        tensors = scope.tensors
        device_bytes = record.engine.fetch(record, tensors.current_task(record.position))
        return tensors.view_for_backward(source, device_bytes, scope, counts_changes=False)


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
