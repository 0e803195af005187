"""What autograd holds instead of a saved tensor.

``Handle`` is a record and the view to make of it; ``Kept`` is an alias of a value that stays. Both remember the version
they saw, because MindSpore's own in-place check is off under hooks. Neither knows when it is needed; the refcount of
the one that a graph holds is the only lifetime there is.
"""

from __future__ import annotations

from typing import Any, NoReturn

from hyper_parallel.backends.mindspore.graph import current_task
from hyper_parallel.backends.mindspore.storages import VersionToken, ViewSpec, alias
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["Handle", "Kept"]


def _raise_changed(*, where: str, shape: Any, dtype: Any, version: int, now: int) -> NoReturn:
    raise InPlaceChangeError(
        f"{where}: a saved tensor {tuple(shape)} {dtype} was changed in place after it was saved (saved at version "
        f"{version}, now at version {now}). Backward would read other values than forward did. Replace the in-place "
        "operation that follows the save by its out-of-place form, or copy the tensor first."
    )


class Kept:
    """A value that stays on the device."""

    __slots__ = ("tensor", "token", "version", "where")

    def __init__(self, tensor: Any, where: str) -> None:
        self.tensor = alias(tensor)
        self.token = VersionToken(tensor)
        self.version = self.token.version
        self.where = where

    def unpack(self) -> Any:
        """The value, if nobody changed it."""
        now = self.token.version
        if now != self.version:
            _raise_changed(
                where=self.where, shape=self.tensor.shape, dtype=self.tensor.dtype, version=self.version, now=now
            )
        return self.tensor


class Handle:
    """A value whose bytes a record keeps, wherever they are."""

    __slots__ = ("record", "token", "version", "view", "where")

    def __init__(self, record: Record, view: ViewSpec, *, token: VersionToken, where: str) -> None:
        self.record = record
        self.view = view
        self.token = token
        self.version = token.version
        self.where = where

    def _check_unchanged(self) -> None:
        now = self.token.version
        if now != self.version:
            _raise_changed(where=self.where, shape=self.view.size, dtype=self.view.dtype, version=self.version, now=now)

    def _value(self) -> Any:
        record = self.record
        return self.view.over(record.engine.fetch(record, current_task(record.position)))

    def unpack(self) -> Any:
        """The exact view, on the device, ordered for the current stream. Repeatable. Raises where the plain step would."""
        self._check_unchanged()
        return self._value()

    def unpack_value(self, *, checks_version: bool) -> Any:
        """The same for a value that the framework would recompute: a later change of the source is no fault.

        The far copy still holds the value when it was ordered before the change; otherwise it may not, and we raise.
        """
        if checks_version and not self.record.snapshot_is_exact:
            self._check_unchanged()
        return self._value()
