"""What becomes of each tensor that autograd saves, or that a region's policy swaps.

:meth:`Packer._decide` is the one place where keep or swap is decided, once for each tensor: the answer is the engine that
moves the bytes, or the reason why they stay. Nothing here knows when bytes move.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Final

from hyper_parallel.config import SwapConfig, current_config
from hyper_parallel.core.activation_checkpoint.adapter import Tensor, TensorAdapter
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed, Scope, SwappedValue
from hyper_parallel.core.activation_checkpoint.policy import TensorPolicy, fate_of_tensor
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.source import Source
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.fates import Fate

__all__ = ["Packer", "SwapHooks"]

_OF_THE_TENSOR: Final = (KeepReason.EMPTY, KeepReason.PARAMETER)
"""Reasons that stand before what settings and policy say."""


class Packer:
    """Decides, for one scope, what becomes of each tensor that is saved in it. Each framework has a subclass.

    ``position`` is given for the scope of a replayed region: all its values are wanted when the replay begins.
    """

    tensors: TensorAdapter

    def __init__(
        self,
        policy_fn: TensorPolicy | None = None,
        *,
        config: SwapConfig | None = None,
        where: str = "swap",
        position: Position | None = None,
    ) -> None:
        self.scope = Scope(self.tensors, where)
        self.config = config if config is not None else current_config()
        self.position = position
        self._policy_fn = policy_fn
        self._min_bytes = max(1, self.config.min_bytes)
        self._manager = SwapManager()
        self._engines: dict[Hashable, Engine | None] = {}
        self._kept_by_policy: dict[
            int, list[Callable[[], bool]]
        ] = {}  # by storage: whether one of its views is still kept

    # ------------------------------------------------------------------ what comes in

    def pack(self, tensor: Tensor) -> Packed:
        """The pack hook: what autograd holds instead of ``tensor``."""
        reason = self.tensors.why_never_swapped(tensor)
        if reason is not None:
            return self._keep(tensor, reason, 0)
        return self._pack_plain(tensor, self.tensors.storage_bytes(tensor))

    def _pack_plain(self, tensor: Tensor, nbytes: int) -> Packed:
        decision = self._decide(tensor, nbytes, is_output=False)
        if isinstance(decision, Engine):
            return self._swap(decision, tensor, nbytes)
        kept = self._keep(tensor, decision, 0 if decision == KeepReason.EMPTY else nbytes)
        if decision == KeepReason.POLICY:
            self._stay_for_all_views(tensor, kept)
        return kept

    def swap_output(self, tensor: Tensor, index: int) -> SwappedValue | None:
        """Swap the output of an op, as a region's policy asks; None where it must stay, with the reason counted."""
        tensors = self.tensors
        reason = tensors.why_never_swapped(tensor)
        nbytes = tensors.bytes_of(tensor) if reason is not None else tensors.storage_bytes(tensor)
        decision = reason if reason is not None else self._decide(tensor, nbytes, is_output=True)
        if isinstance(decision, Engine):
            return self._swap(decision, tensor, nbytes, index=index, is_below_autograd=True)
        self._manager.counters.keep(decision, nbytes)
        return None

    def flush(self) -> None:
        """The scope has ended: launch the copies that wait for more, and add what was counted to the statistics."""
        for engine in self._engines.values():
            if engine is not None:
                engine.launch_batch(trims_window=self.position is None)

    # ------------------------------------------------------------------ keep or swap

    def _decide(self, tensor: Tensor, nbytes: int, *, is_output: bool) -> Engine | str:
        """The engine that moves the tensor's storage, or the :class:`KeepReason` why it stays.

        ``is_output``: an op's output, for which a region's policy has answered swap. Otherwise autograd saves the tensor, and
        the tensor policy of this scope is asked.
        """
        why_kept = self.tensors.why_kept(tensor, nbytes, is_output)
        if why_kept in _OF_THE_TENSOR:
            return why_kept
        if nbytes < self._min_bytes and self._policy_fn is None and not is_output:
            return KeepReason.SMALL
        fate = Fate.SWAP if is_output or self._policy_fn is None else self._fate_of(tensor)
        engine = self.engine_of(tensor)
        if engine is None:
            return KeepReason.HOST
        if fate is Fate.SAVE:
            return KeepReason.POLICY
        if nbytes < self._min_bytes:
            return KeepReason.SMALL
        return engine if why_kept is None else why_kept

    def _fate_of(self, tensor: Tensor) -> Fate:
        """The policy's answer for this view. A mark overrules it. A storage that stays for one view stays for all."""
        assert self._policy_fn is not None, "without a policy everything is swapped"
        key = self.tensors.storage_key(tensor)
        if key in self._manager.marks:
            return Fate.SWAP
        fate = fate_of_tensor(self._policy_fn(tensor), tensor, where=self.scope.where)
        if fate is Fate.SWAP and any(is_alive() for is_alive in self._kept_by_policy.get(key, ())):
            return Fate.SAVE
        return fate

    def _stay_for_all_views(self, tensor: Tensor, kept: KeptValue) -> None:
        """A storage that stays for one view does not leave through another, also not one that was saved before."""
        tensors = self.tensors
        source = tensors.source_of(tensor, False)
        key = source.storage_key
        known = [is_alive for is_alive in self._kept_by_policy.get(key, ()) if is_alive()]
        self._kept_by_policy[key] = [*known, tensors.storage_watch(tensor, kept.tensor)]
        engine = self.engine_of(tensor)
        record = None if engine is None else engine.find(source)
        if record is not None:
            record.stays = True

    def engine_of(self, tensor: Tensor) -> Engine | None:
        """The schedule of its device; None when its tensors are in host memory already."""
        device = self.tensors.device_key(tensor)
        try:
            return self._engines[device]
        except KeyError:
            backend = self.tensors.backend_for(device, self.config)
            engine = None if backend is None else self._manager.engine(backend, self.config)
            self._engines[device] = engine
            return engine

    # ------------------------------------------------------------------ what goes out

    def _keep(self, tensor: Tensor, reason: str, nbytes: int) -> KeptValue:
        self._manager.counters.keep(reason, nbytes)
        return KeptValue.of(tensor, self.scope)

    def _swap(
        self, engine: Engine, tensor: Tensor, nbytes: int, *, index: int = 0, is_below_autograd: bool = False
    ) -> SwappedValue:
        """The packed value on the record of this storage: the one that exists, or a new one."""
        tensors = self.tensors
        tensors.refuse_capture(self.scope.where)
        source = tensors.source_of(tensor, is_below_autograd)
        record = engine.find(source)
        if record is None:
            record = self._new_record(engine, tensor, nbytes, source, index)
        else:
            engine.share(record)
            self._manager.move_record_to_current_group(record)
        return SwappedValue(record, source, self.scope)

    def _new_record(self, engine: Engine, tensor: Tensor, nbytes: int, source: Source, index: int) -> Record:
        tensors, manager, position = self.tensors, self._manager, self.position
        group, marks = manager.current_group() if manager.groups else None, manager.marks
        record = engine.admit(
            tensors.flat_bytes(tensor),
            nbytes,
            position=Position(tensors.sequence_of_save()) if position is None else position,
            index=index,
            group=group,
            tag=marks.tag_of(source.storage_key) if marks.has_any else None,
            stays=group is not None and group.is_last_group,
            source=source,
            is_in_region=position is not None,
        )
        if group is not None:
            group.records.add(record)
        return record


class SwapHooks:
    """A pair of saved-tensors hooks around a scope. The other base of a subclass is the framework's own class of hooks."""

    packer_class: ClassVar[type[Packer]]
    unpack: ClassVar[Any]  # (Packed) -> Tensor; a static function, so that a graph holds no context manager

    def __init__(
        self,
        policy_fn: TensorPolicy | None = None,
        *,
        swap_config: SwapConfig | None = None,
        where: str = "AsyncSaveOnCpu",
        position: Position | None = None,
        **packer_options: Any,
    ) -> None:
        self._packer = self.packer_class(
            policy_fn, config=swap_config, where=where, position=position, **packer_options
        )
        super().__init__(self._packer.pack, type(self).unpack)  # type: ignore[call-arg]  # the framework's class

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[misc]  # the framework's class
        self._packer.flush()
