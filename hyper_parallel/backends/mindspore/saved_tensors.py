"""The saved-tensors hooks under which swapping happens.

``pack`` decides once what becomes of a tensor: a :class:`Handle` whose bytes leave, or a :class:`Kept` alias with the
reason counted. ``unpack`` only asks the packed object. Nothing here knows when bytes move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.devices import backend_for
from hyper_parallel.backends.mindspore.graph import (
    is_in_backward,
    next_sequence,
    note_second_order,
    refuse_second_order,
)
from hyper_parallel.backends.mindspore.packed import Handle, Kept
from hyper_parallel.backends.mindspore.storages import (
    VersionToken,
    ViewSpec,
    flat_bytes,
    storage_key,
)
from hyper_parallel.config import SwapConfig, current_config
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PolicyError

__all__ = ["AsyncSaveOnCpu", "Packer", "TensorPolicy", "base_check_fn", "unpack"]

TensorPolicy = Callable[[Any], Any]

_SWAPS = frozenset({CheckpointPolicy.MUST_SWAP})
_SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})


def base_check_fn(tensor: Any) -> bool:
    """Whether a value can be swapped at all: False for a non-tensor, a parameter and an empty tensor."""
    if not isinstance(tensor, mindspore.Tensor) or isinstance(tensor, mindspore.Parameter):
        return False
    # What a pack hook gets for a parameter is a plain tensor that carries the parameter's description.
    return tensor.param_info is None and tensor.size > 0


def unpack(packed: Handle | Kept) -> Any:
    """The unpack hook: a function of its own, so that a graph holds no context manager."""
    note_second_order()
    refuse_second_order(packed.where)
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
        parameters: Iterable[Any] = (),
    ) -> None:
        self.config = config if config is not None else current_config()
        self.where = where
        self._policy_fn = policy_fn
        self._position = position
        self._min_bytes = max(1, self.config.min_bytes)
        self._manager = SwapManager()
        self._engines: dict[str, Engine | None] = {}
        self._kept_by_policy: dict[int, Kept] = {}
        # A view of a parameter does not say so; its address does. Parameters outlive the call that packs.
        self._parameter_keys = {storage_key(parameter) for parameter in parameters}

    def pack(self, tensor: Any) -> Handle | Kept:
        """The pack hook."""
        if tensor.param_info is not None:
            self._parameter_keys.add(storage_key(tensor))
            return self._keep(tensor, KeepReason.PARAMETER, 0)
        nbytes = int(tensor.untyped_storage().nbytes())
        if nbytes == 0 or tensor.size == 0:
            return self._keep(tensor, KeepReason.EMPTY, 0)
        if storage_key(tensor) in self._parameter_keys:
            return self._keep(tensor, KeepReason.PARAMETER, nbytes)
        if nbytes < self._min_bytes and self._policy_fn is None:
            return self._keep(tensor, KeepReason.SMALL, nbytes)
        return self._pack_by_policy(tensor, nbytes)

    def _pack_by_policy(self, tensor: Any, nbytes: int) -> Handle | Kept:
        is_marked = storage_key(tensor) in self._manager.marks
        answer = None if is_marked else self._ask(tensor)
        engine = self.engine_of(tensor)
        if engine is None:
            return self._keep(tensor, KeepReason.HOST, nbytes)
        if answer is not None and answer in _SAVES:
            return self._keep_by_policy(engine, tensor, nbytes)
        if storage_key(tensor) in self._kept_by_policy and not is_marked:
            return self._keep(tensor, KeepReason.POLICY, nbytes)
        if nbytes < self._min_bytes:
            return self._keep(tensor, KeepReason.SMALL, nbytes)
        if is_in_backward():
            return self._keep(tensor, KeepReason.IN_BACKWARD, nbytes)
        return self.swap(engine, tensor, nbytes)

    def _ask(self, tensor: Any) -> CheckpointPolicy | None:
        if self._policy_fn is None:
            return None
        answer = self._policy_fn(tensor)
        if answer is None or answer in _SWAPS or answer in _SAVES:
            return answer  # type: ignore[no-any-return]
        raise PolicyError(
            f"{self.where}: the tensor policy answered {answer!r} for a tensor {tuple(tensor.shape)} {tensor.dtype}; known "
            "answers are CheckpointPolicy.MUST_SAVE, PREFER_SAVE, MUST_SWAP, and None (swap)"
        )

    def _keep_by_policy(self, engine: Engine, tensor: Any, nbytes: int) -> Kept:
        """A storage one of whose views must stay does not leave through another."""
        kept = self._keep(tensor, KeepReason.POLICY, nbytes)
        self._kept_by_policy[storage_key(tensor)] = kept  # holds the bytes, so that the address names nothing else
        record = engine.find(storage_key(tensor), kept.version)
        if record is not None:
            record.stays = True
        return kept

    def flush(self) -> None:
        """The scope is over: let go of what was held for its sake."""
        self._kept_by_policy = {}

    def engine_of(self, tensor: Any) -> Engine | None:
        """The schedule of its device; None when its tensors are in host memory already."""
        device = str(tensor.device)
        try:
            return self._engines[device]
        except KeyError:
            backend = backend_for(device, self.config)
            engine = None if backend is None else self._manager.engine(backend, self.config)
            self._engines[device] = engine
            return engine

    def _keep(self, tensor: Any, reason: str, nbytes: int) -> Kept:
        self._manager.counters.keep(reason, nbytes)
        return Kept(tensor, self.where)

    def swap(self, engine: Engine, tensor: Any, nbytes: int, *, index: int = 0) -> Handle:
        """A handle on the record of this storage: the one that exists, or a new one."""
        token = VersionToken(tensor)
        record = engine.find(storage_key(tensor), token.version)
        if record is None:
            record = self._new_record(engine, tensor, nbytes, token, index)
        else:
            engine.share(record)
            self._manager.adopt(record)
        return Handle(record, ViewSpec(tensor), token=token, where=self.where)

    def _new_record(self, engine: Engine, tensor: Any, nbytes: int, token: VersionToken, index: int) -> Record:
        version = token.version
        key = storage_key(tensor)
        group = self._manager.current_group()
        source = _Source()
        record = engine.admit(
            flat_bytes(tensor),
            nbytes,
            position=self._position if self._position is not None else Position(next_sequence()),
            index=index,
            group=group,
            tag=self._manager.marks.tag_of(key),
            stays=group is not None and group.is_last_group,
            storage_key=key,
            version=version,
            is_alive=source.is_held,
            source_is_unchanged=lambda: token.version == version,
        )
        source.watch(record)
        if group is not None:
            group.records.add(record)
        return record


class _Source:
    """Whether the bytes a record was made from still lie at their address: as long as the record itself holds them.

    MindSpore does not tell when a storage dies (see "names of storages"). Once our reference went, the address may name
    another storage, so the record is not found again and a later save of the same bytes gets a record of its own.
    """

    __slots__ = ("_address", "_record")

    def __init__(self) -> None:
        self._record: Callable[[], Record | None] = lambda: None
        self._address = 0

    def watch(self, record: Record) -> None:
        """The record is made."""
        self._record = weakref.ref(record)
        self._address = 0 if record.device_bytes is None else record.device_bytes.storage_address

    def is_held(self) -> bool:
        """Whether the record still holds its first bytes."""
        record = self._record()
        held = None if record is None else record.device_bytes
        return held is not None and bool(held.storage_address == self._address)


class AsyncSaveOnCpu(mindspore.saved_tensors_hooks):  # type: ignore[misc]
    """``with AsyncSaveOnCpu():`` what autograd saves inside leaves the device, asynchronously, and comes back in time."""

    def __init__(
        self,
        policy_fn: TensorPolicy | None = None,
        *,
        swap_config: SwapConfig | None = None,
        where: str = "AsyncSaveOnCpu",
        position: Position | None = None,
        parameters: Iterable[Any] = (),
    ) -> None:
        self._packer = Packer(policy_fn, config=swap_config, where=where, position=position, parameters=parameters)
        super().__init__(self._packer.pack, unpack)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._packer.flush()
