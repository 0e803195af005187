"""A saved tensor without its bytes: how to make its view again, and what shows whether it was changed since.

A native class of torch's backend has the same members (``backends/torch/native/sources.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes, Tensor, VersionToken, View

__all__ = ["Source"]


class Source:
    """What a record and the values on it remember of the tensor that was saved. It holds no bytes."""

    __slots__ = ("is_alive", "share_key", "storage_key", "token", "version", "view")

    def __init__(
        self,
        view: View,
        token: VersionToken,
        *,
        storage_key: int,
        share_key: Hashable,
        is_alive: Callable[[], bool],
    ) -> None:
        self.view = view
        self.token = token
        self.version = token._version  # when it was saved
        self.storage_key = storage_key
        self.share_key = share_key  # names the storage together with the version counter
        self.is_alive = is_alive  # whether the storage is

    @property
    def _version(self) -> int:
        """See :class:`~hyper_parallel.core.activation_checkpoint.adapter.VersionToken`."""
        return self.token._version

    @property
    def size(self) -> Any:
        """The size of the view."""
        return self.view.size

    @property
    def dtype(self) -> Any:
        """The dtype of the view."""
        return self.view.dtype

    def is_unchanged(self) -> bool:
        """Whether no change in place was counted since the save."""
        return self.token._version == self.version

    def over(self, device_bytes: FlatBytes) -> Tensor:
        """The saved view over these bytes."""
        return self.view.over(device_bytes)
