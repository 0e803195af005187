"""The saved-tensors hooks under which swapping happens, on torch.

``core.activation_checkpoint.packer`` decides what becomes of a tensor. What is here is torch's exception "the cheap path":
most saved tensors are small, and must cost a few microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.backends.torch.storages import NO_STORAGE_ERRORS, alias, is_below_counter
from hyper_parallel.backends.torch.tensor_adapter import fastest_adapter
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed
from hyper_parallel.core.activation_checkpoint.packer import Packer, SwapHooks
from hyper_parallel.core.activation_checkpoint.policy import TensorPolicy
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.platform.torch import compat

__all__ = ["AsyncSaveOnCpu", "TensorPolicy", "TorchPacker", "base_check_fn", "unpack"]

_has_modes = torch._C._len_torch_dispatch_stack


def base_check_fn(tensor: Any) -> bool:
    """Whether a value can be swapped at all: False for a non-tensor, a parameter (or its view) and an empty tensor."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        return False
    if isinstance(tensor._base, torch.nn.Parameter):
        return False
    return tensor.numel() > 0


def unpack(packed: Packed) -> torch.Tensor:
    """The unpack hook: a function of its own, so that a graph holds no context manager."""
    if packed.__class__ is KeptValue:  # most values are kept, and need no further call
        tensor: torch.Tensor = packed.tensor
        if tensor._version == packed.version:
            return tensor
    return packed.unpack()  # type: ignore[no-any-return]


class TorchPacker(Packer):
    """A packer that keeps small tensors, where no policy wants to be asked, before anything else is looked at."""

    _small_bytes = 0
    _small_count = 0

    def __init__(self, policy_fn: TensorPolicy | None = None, **settings: Any) -> None:
        self.tensors = fastest_adapter()
        super().__init__(policy_fn, **settings)

    def engine_of(self, tensor: torch.Tensor) -> Engine | None:
        """See the base class."""
        try:
            return self._engines[tensor.device]
        except KeyError:
            return super().engine_of(tensor)

    def flush(self) -> None:
        """See the base class."""
        super().flush()
        if self._small_count:
            self._manager.counters.keep_many(KeepReason.SMALL, self._small_bytes, self._small_count)
            self._small_bytes = self._small_count = 0

    def pack(self, tensor: torch.Tensor) -> Packed:
        """See the base class."""
        if tensor.__class__ is not torch.Tensor:
            return super().pack(tensor)
        try:
            nbytes = self.tensors.storage_bytes(tensor)
        except NO_STORAGE_ERRORS:
            return super().pack(tensor)
        if nbytes < self._min_bytes and self._policy_fn is None:
            self._small_bytes += nbytes
            self._small_count += 1
            detached = alias(tensor) if _has_modes() or is_below_counter() else tensor.detach()
            return KeptValue(detached, detached, detached._version, self.scope)
        return self._pack_plain(tensor, nbytes)


# A compiled module may run uncompiled inside (under a dispatch mode). Then dynamo would trace the hooks around it.
compat.skip_in_compiler(TorchPacker.pack)
compat.skip_in_compiler(unpack)


class AsyncSaveOnCpu(SwapHooks, saved_tensors_hooks):
    """``with AsyncSaveOnCpu():`` what autograd saves inside leaves the device, asynchronously, and comes back in time."""

    packer_class = TorchPacker
    unpack = staticmethod(unpack)
