"""The saved-tensors hooks under which swapping happens, on MindSpore.

``core.activation_checkpoint.packer`` decides what becomes of a tensor. What is here are MindSpore's exceptions "views of
parameters" and "second order refused" (``graph``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.graph import refuse_second_order, remember_second_order
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.packed import Packed
from hyper_parallel.core.activation_checkpoint.packer import Packer, SwapHooks
from hyper_parallel.core.activation_checkpoint.policy import TensorPolicy
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.source import Source
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason

__all__ = ["AsyncSaveOnCpu", "MindSporePacker", "TensorPolicy", "base_check_fn", "unpack"]


def base_check_fn(tensor: Any) -> bool:
    """Whether a value can be swapped at all: False for a non-tensor, a parameter and an empty tensor."""
    if not isinstance(tensor, mindspore.Tensor) or isinstance(tensor, mindspore.Parameter):
        return False
    return TENSORS.why_never_swapped(tensor) is None and not TENSORS.is_empty(tensor)


def unpack(packed: Packed) -> Any:
    """The unpack hook: a function of its own, so that a graph holds no context manager."""
    remember_second_order()
    refuse_second_order(packed.scope.where)
    return packed.unpack()


class MindSporePacker(Packer):
    """A packer that knows views of parameters by their address: MindSpore does not mark them.

    Parameters outlive the call that packs.
    """

    tensors = TENSORS

    def __init__(
        self, policy_fn: TensorPolicy | None = None, *, parameters: Iterable[Any] = (), **settings: Any
    ) -> None:
        super().__init__(policy_fn, **settings)
        self._parameter_keys = {storage_key(parameter) for parameter in parameters}

    def pack(self, tensor: Any) -> Packed:
        """See the base class."""
        if tensor.param_info is not None:
            self._parameter_keys.add(storage_key(tensor))
        return super().pack(tensor)

    def _decide(self, tensor: Any, nbytes: int, *, is_output: bool) -> Engine | str:
        if nbytes and not is_output and tensor.size and storage_key(tensor) in self._parameter_keys:
            return KeepReason.PARAMETER
        return super()._decide(tensor, nbytes, is_output=is_output)

    def _new_record(self, engine: Engine, tensor: Any, nbytes: int, source: Source, index: int) -> Record:
        """See the base class. The record's own bytes hold the storage, and MindSpore tells when they are dropped."""
        record = super()._new_record(engine, tensor, nbytes, source, index)
        device_bytes = record.device_bytes
        source.is_alive = _never if device_bytes is None else TENSORS.storage_watch(tensor, device_bytes)
        return record


def _never() -> bool:
    return False


class AsyncSaveOnCpu(SwapHooks, mindspore.saved_tensors_hooks):  # type: ignore[misc]
    """``with AsyncSaveOnCpu():`` what autograd saves inside leaves the device, asynchronously, and comes back in time."""

    packer_class = MindSporePacker
    unpack = staticmethod(unpack)
