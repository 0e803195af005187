"""The pack hook that takes marked tensors only; see "hooks at the bottom" in ``marks``."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.core.activation_checkpoint.adapter import Tensor
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed
from hyper_parallel.core.activation_checkpoint.packer import Packer
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["MarkedOnly"]


class MarkedOnly:
    """Marked tensors leave; of all others only the version is checked.

    ``without_marks`` is called when the hook is asked although no marked tensor lives.
    """

    def __init__(self, packer: Packer, without_marks: Callable[[], None] | None = None) -> None:
        self._packer = packer
        self._without_marks = without_marks

    def __call__(self, tensor: Tensor) -> Packed:
        """The pack hook."""
        marks = SwapManager().marks
        packer = self._packer
        if packer.tensors.storage_key_if_any(tensor) in marks:
            return packer.pack(tensor)
        if self._without_marks is not None and not marks:
            self._without_marks()
        return KeptValue.of(tensor, packer.scope)
