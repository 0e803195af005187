"""The saved-tensors hooks under which swapping happens.

``pack`` decides once what becomes of a tensor: a :class:`Handle` whose bytes leave, or a :class:`Kept` alias with the
reason counted. ``unpack`` only asks the packed object. Nothing here knows when bytes move.

The cheap path comes first: most saved tensors are small, and must cost a few microseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.backends.torch.devices import backend_for, refuse_capture
from hyper_parallel.backends.torch.graph import is_in_backward, next_sequence
from hyper_parallel.backends.torch.packed import Handle, Kept
from hyper_parallel.backends.torch.storages import (
    ViewSpec,
    alias,
    flat_bytes,
    is_below_counter,
    is_changed_piece,
    is_copied_by_bytes,
    is_parameter_derived,
    share_key,
    storage_watch,
    version_token,
)
from hyper_parallel.config import SwapConfig, current_config
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PolicyError

__all__ = ["ActivationPolicy", "AsyncSaveOnCpu", "Packer", "TensorPolicy", "base_check_fn", "unpack"]

TensorPolicy = Callable[[torch.Tensor], Any]

_has_modes = torch._C._len_torch_dispatch_stack
_EXOTIC_ERRORS = (NotImplementedError, RuntimeError)


class ActivationPolicy(enum.Enum):
    """What a tensor policy may answer, beside :class:`CheckpointPolicy` and None."""

    SAVE = 0
    SWAP = 1


_SWAPS = frozenset({CheckpointPolicy.MUST_SWAP, ActivationPolicy.SWAP})
_SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, ActivationPolicy.SAVE})


def base_check_fn(tensor: Any) -> bool:
    """Whether a value can be swapped at all: False for a non-tensor, a parameter (or its view) and an empty tensor."""
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        return False
    if isinstance(tensor._base, torch.nn.Parameter):
        return False
    return tensor.numel() > 0


def unpack(packed: Handle | Kept) -> torch.Tensor:
    """The unpack hook: a function of its own, so that a graph holds no context manager."""
    if packed.__class__ is Kept:  # by far the most: spare it a call
        tensor = packed.tensor
        if tensor._version == packed.version:
            return tensor
    return packed.unpack()


class Packer:
    """Decides, for one scope, what becomes of each tensor that is saved in it."""

    def __init__(
        self,
        policy_fn: TensorPolicy | None = None,
        *,
        config: SwapConfig | None = None,
        where: str = "swap",
        position: Position | None = None,
    ) -> None:
        self.config = config if config is not None else current_config()
        self.where = where
        self._policy_fn = policy_fn
        self._position = position
        self._min_bytes = max(1, self.config.min_bytes)
        self._manager = SwapManager()
        self._engines: dict[torch.device, Engine | None] = {}
        self._kept_by_policy: dict[int, Callable[[], bool]] = {}
        self._small_bytes = 0
        self._small_count = 0

    def flush(self) -> None:
        """Hand the counts of the cheap path over."""
        if self._small_count:
            self._manager.counters.keep_many(KeepReason.SMALL, self._small_bytes, self._small_count)
            self._small_bytes = self._small_count = 0

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        """The pack hook."""
        if tensor.__class__ is not torch.Tensor:
            return self._pack_unusual(tensor)
        try:
            storage = tensor.untyped_storage()
        except _EXOTIC_ERRORS:
            return self._keep(tensor, KeepReason.EXOTIC, 0)
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes and self._policy_fn is None:
            self._small_bytes += nbytes
            self._small_count += 1
            detached = alias(tensor) if _has_modes() or is_below_counter() else tensor.detach()
            return Kept(detached, detached._version, self.where)
        return self._pack_plain(tensor, storage, nbytes)

    def _pack_unusual(self, tensor: torch.Tensor) -> Handle | Kept:
        if isinstance(tensor, torch.nn.Parameter):
            return self._keep(tensor, KeepReason.PARAMETER, 0)
        return self._keep(tensor, KeepReason.EXOTIC, 0)

    def _pack_plain(self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> Handle | Kept:
        if nbytes == 0 or tensor.numel() == 0:
            return self._keep(tensor, KeepReason.EMPTY, 0)
        if is_parameter_derived(tensor):
            return self._keep(tensor, KeepReason.PARAMETER, nbytes)
        wants_swap = self._asks_for_swap(tensor, storage)
        engine = self.engine_of(tensor.device)
        if engine is None:
            return self._keep(tensor, KeepReason.HOST, nbytes)
        if not wants_swap:
            return self._keep(tensor, KeepReason.POLICY, nbytes)
        if nbytes < self._min_bytes:
            return self._keep(tensor, KeepReason.SMALL, nbytes)
        if not is_copied_by_bytes(tensor, storage) or is_changed_piece(tensor, nbytes):
            return self._keep(tensor, KeepReason.EXOTIC, nbytes)
        if is_in_backward():
            return self._keep(tensor, KeepReason.IN_BACKWARD, nbytes)
        return self.swap(engine, tensor, storage, nbytes)

    def _asks_for_swap(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """The policy's word for this view; and a storage one of whose views must stay does not leave through another."""
        if self._policy_fn is None or storage._cdata in self._manager.marks:
            return True
        answer = self._policy_fn(tensor)
        is_known = isinstance(answer, enum.Enum)
        if answer is None or (is_known and answer in _SWAPS):
            is_alive = self._kept_by_policy.get(storage._cdata)
            return is_alive is None or not is_alive()
        if not is_known or answer not in _SAVES:
            raise PolicyError(
                f"{self.where}: the tensor policy answered {answer!r} for a tensor {tuple(tensor.shape)} {tensor.dtype}; known "
                "answers are CheckpointPolicy.MUST_SAVE, PREFER_SAVE, MUST_SWAP, ActivationPolicy.SAVE, SWAP, and None (swap)"
            )
        self._kept_by_policy[storage._cdata] = storage_watch(storage)
        engine = self.engine_of(tensor.device)
        record = engine.find(share_key(tensor, storage), tensor._version) if engine is not None else None
        if record is not None:
            record.stays = True
        return False

    def engine_of(self, device: torch.device) -> Engine | None:
        """The schedule of this device; None when its tensors are in host memory already."""
        try:
            return self._engines[device]
        except KeyError:
            backend = backend_for(device, self.config)
            engine = None if backend is None else self._manager.engine(backend, self.config)
            self._engines[device] = engine
            return engine

    def _keep(self, tensor: torch.Tensor, reason: str, nbytes: int) -> Kept:
        self._manager.counters.keep(reason, nbytes)
        return Kept(alias(tensor), tensor._version, self.where)

    def swap(
        self,
        engine: Engine,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        *,
        index: int = 0,
        is_below_autograd: bool = False,
    ) -> Handle:
        """A handle on the record of this storage: the one that exists, or a new one."""
        refuse_capture(self.where)
        version = tensor._version
        token = version_token(tensor, is_below_autograd=is_below_autograd)
        key = share_key(tensor, storage)
        record = engine.find(key, version)
        if record is None:
            record = self._new_record(engine, storage, nbytes, token, key, index)
        else:
            engine.share(record)
            self._manager.adopt(record)
        return Handle(record, ViewSpec(tensor), token=token, version=version, where=self.where)

    def _new_record(
        self,
        engine: Engine,
        storage: torch.UntypedStorage,
        nbytes: int,
        token: torch.Tensor,
        key: Hashable,
        index: int,
    ) -> Record:
        version = token._version
        position = self._position
        if position is None:
            position = Position(next_sequence() - 1)
        group = self._manager.current_group()
        record = engine.admit(
            flat_bytes(storage),
            nbytes,
            position=position,
            index=index,
            group=group,
            tag=self._manager.marks.tag_of(storage._cdata),
            stays=group is not None and group.is_last_group,
            storage_key=storage._cdata,
            share_key=key,
            version=version,
            is_alive=storage_watch(storage),
            source_is_unchanged=lambda: token._version == version,
            is_in_region=self._position is not None,
        )
        if group is not None:
            group.records.add(record)
        return record


class AsyncSaveOnCpu(saved_tensors_hooks):
    """``with AsyncSaveOnCpu():`` what autograd saves inside leaves the device, asynchronously, and comes back in time."""

    def __init__(
        self,
        policy_fn: TensorPolicy | None = None,
        *,
        swap_config: SwapConfig | None = None,
        where: str = "AsyncSaveOnCpu",
        position: Position | None = None,
    ) -> None:
        self._packer = Packer(policy_fn, config=swap_config, where=where, position=position)
        super().__init__(self._packer.pack, unpack)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._packer.flush()
