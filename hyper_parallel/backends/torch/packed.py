"""What autograd holds instead of a saved tensor.

``Handle`` is a record and the view to make of it; ``Kept`` is an alias of a value that stays. Both remember the version
they saw, because torch's own in-place check is off under hooks. Neither knows when it is needed; the refcount of the
one that a graph holds is the only lifetime there is.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hyper_parallel.backends.torch.graph import current_task
from hyper_parallel.backends.torch.storages import ViewSpec
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["Handle", "Kept", "raise_changed"]


def raise_changed(*, where: str, shape: torch.Size, dtype: torch.dtype, version: int, now: int) -> NoReturn:
    """The error of a value that was changed between its save and its use."""
    node: Any = torch._C._current_autograd_node()  # torch.autograd.graph.Node | None
    wanted_by = "outside backward" if node is None else f"wanted by {type(node).name(node)}"
    raise InPlaceChangeError(
        f"{where}: a saved tensor {tuple(shape)} {dtype}, {wanted_by}, was changed in place after it was saved "
        f"(saved at version {version}, now at version {now}). Backward would read other values than forward did. "
        "Replace the in-place operation that follows the save by its out-of-place form (x = x + y), or clone the tensor first."
    )


class Kept:
    """A value that stays on the device."""

    __slots__ = ("tensor", "version", "where")

    def __init__(self, tensor: torch.Tensor, version: int, where: str) -> None:
        self.tensor = tensor  # an alias, never the saved tensor itself
        self.version = version
        self.where = where

    def unpack(self) -> torch.Tensor:
        """The value, if nobody changed it."""
        if self.tensor._version != self.version:
            raise_changed(
                where=self.where,
                shape=self.tensor.shape,
                dtype=self.tensor.dtype,
                version=self.version,
                now=self.tensor._version,
            )
        return self.tensor


class Handle:
    """A value whose bytes a record keeps, wherever they are."""

    __slots__ = ("record", "token", "version", "view", "where")

    def __init__(self, record: Record, view: ViewSpec, *, token: torch.Tensor, version: int, where: str) -> None:
        self.record = record
        self.view = view
        self.token = token
        self.version = version
        self.where = where

    def is_unchanged(self) -> bool:
        """Whether nobody changed the source in place since it was saved."""
        return self.token._version == self.version

    def _check_unchanged(self) -> None:
        if not self.is_unchanged():
            raise_changed(
                where=self.where,
                shape=self.view.size,
                dtype=self.view.dtype,
                version=self.version,
                now=self.token._version,
            )

    def unpack(self) -> torch.Tensor:
        """The exact view, on the device, ordered for the current stream. Repeatable. Raises where the plain step would."""
        self._check_unchanged()
        return self._over(self.record.engine.fetch(self.record, current_task()))

    def _over(self, device_bytes: Any) -> torch.Tensor:
        """The view over these bytes, held as long as they are.

        The plain step's graph holds the tensor that it hands to a backward. Were ours the only one, and were it returned as a
        gradient, ``AccumulateGrad`` would take it over, and every later change of ``.grad`` would change the saved bytes.
        """
        views: dict[ViewSpec, tuple[torch.Tensor, int]] = device_bytes.__dict__.setdefault("handed_out", {})
        for view, version in tuple(views.values()):  # another thread may add to them
            if view._version != version:
                raise_changed(where=self.where, shape=view.shape, dtype=view.dtype, version=version, now=view._version)
        known = views.get(self.view)
        if known is not None:
            return known[0]
        made = self.view.over(device_bytes)
        views[self.view] = made, made._version
        return made

    def unpack_value(self, *, checks_version: bool) -> torch.Tensor:
        """The same for a value that the framework would recompute: a later change of the source is no fault.

        The far copy still holds the value when it was ordered before the change; otherwise it may not, and we raise.
        """
        if checks_version and not self.record.snapshot_is_exact:
            self._check_unchanged()
        return self._over(self.record.engine.fetch(self.record, current_task()))
