"""Selective checkpointing: one region, every op instance saved, swapped or recomputed.

A pair of dispatch modes behind MindSpore's own non-reentrant recompute. The forward mode runs each op, asks the policy
once and files what became of the output under (op name, how many of that op came before). The replay mode looks the same
key up. Entries are not consumed, so a second backward and a retry after an exception find them again.

Rules
-----
1. Views, in-place ops, factories and collectives are replayed whatever the policy says (``ops``).
2. An op that draws random numbers is never replayed: where the policy would recompute it, its output is kept and the
   policy counts as overruled. One that draws in place can be neither kept nor replayed, and is refused. With
   ``preserve_rng_state=False`` an op that draws is like any other: where it is recomputed, it draws other numbers.
3. An in-place op that changes a filed output is seen by the forward mode before it runs. A swapped one is ordered after
   its copy out, a saved one is copied first; the replay then hands out a copy, because it will apply the same change again.
4. A change that happens outside the region, after it ended, shows in the version counter, if MindSpore counts it. The replay
   then runs the op again, because its kept bytes are gone. An op that draws cannot be run again, and raises.
5. Our own tensor ops run unseen, so that an outer region's counting is not shifted.
6. A gradient that is taken inside the region replays it while forward still runs. Forward then files nothing, and the
   replay runs ahead of what is filed; an op that draws is refused there.
7. A parameter of the region's cells that was changed after forward shows in its version or its address, if MindSpore
   moves one of them. The first op of the replay that reads it raises (``region_state``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.devices import copied
from hyper_parallel.backends.mindspore.draws import Drawing
from hyper_parallel.backends.mindspore.graph import (
    current_task,
    next_sequence,
    refuse_second_order,
)
from hyper_parallel.backends.mindspore.ops import (
    OpFacts,
    facts_of,
    inputs_of,
    replay_reason,
    tensors_in,
)
from hyper_parallel.backends.mindspore.packed import Handle, Kept
from hyper_parallel.backends.mindspore.region_state import RegionState
from hyper_parallel.backends.mindspore.saved_tensors import Packer
from hyper_parallel.backends.mindspore.storages import alias, is_seen, storage_key
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.contexts import Replay
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.policy import ByOpName, PolicyContext, as_op_policy, checked_answer
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.region_state import changed_in_place
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import ActivationError, InPlaceChangeError, ReplayMismatchError
from hyper_parallel.platform.mindspore import compat

__all__ = ["ForwardMode", "Region", "ReplayMode", "create_selective_checkpoint_contexts"]

_RECOMPUTES = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
_CONTEXT = PolicyContext()

Shapes = list[tuple[Any, Any]]  # (shape, mindspore.dtype) of each tensor an op read


class Filed:
    """An op instance whose output the replay hands out."""

    __slots__ = ("inputs", "is_changed_later", "output")

    def __init__(self, output: Any, inputs: Shapes) -> None:
        self.output = output  # the op's output with every tensor packed
        self.inputs = inputs
        self.is_changed_later = False


class Region:
    """One call of a checkpointed function: what became of each op instance; None stands for one that is replayed."""

    def __init__(
        self,
        policy: Any,
        *,
        where: str,
        config: SwapConfig | None = None,
        position: Position | None = None,
        allows_mutation: bool = False,
        preserves_draws: bool = True,
        state: RegionState | None = None,
    ) -> None:
        self.policy = policy
        self.state = state  # is told of writes in forward, and knows what was changed since then
        self.where = where
        self.position = position if position is not None else Position(next_sequence())
        self.allows_mutation = allows_mutation
        self.entries: dict[str, list[Filed | None]] = {}
        self.filed_by_storage: dict[int, list[Filed]] = {}
        self.packer = Packer(config=config, where=where, position=self.position)
        self.engines: set[Engine] = set()
        self.preserves_draws = preserves_draws
        self.drawing: Any = Drawing() if preserves_draws else contextlib.nullcontext()
        self.is_open = False  # forward runs
        self.is_replaying = False

    def close(self) -> None:
        """Forward is over: from here the region's values are wanted when backward comes back to it."""
        self.is_open = False
        self.position.sequence = next_sequence()
        self.filed_by_storage = {}
        self.packer.flush()


class ForwardMode(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Runs each op and files what becomes of its output."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._answers: dict[str, CheckpointPolicy] | None = {} if isinstance(region.policy, ByOpName) else None
        self._recomputed_bytes = 0
        self._saved_bytes = 0
        self._replayed: dict[str, int] = {}
        self._overruled = 0
        self._index = 0
        self._written: dict[int, Any] = {}  # address -> an alias that holds it

    def __enter__(self) -> ForwardMode:
        self._region.drawing.__enter__()
        self._region.is_open = True
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        leaves = super().__exit__(*exc)
        self._written = {}
        self._region.close()
        self._region.drawing.__exit__(*exc)
        counters = SwapManager().counters
        counters.add("recomputed_bytes", self._recomputed_bytes)
        counters.add("saved_bytes", self._saved_bytes)
        counters.add_to("overruled", "random_op_kept", self._overruled)
        for reason, count in self._replayed.items():
            counters.add_to("replayed_ops", reason, count)
        return leaves

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Run one op."""
        facts = facts_of(func.name)
        if self._written and is_seen():
            self._refuse_lost_gradient(args)
        if facts.is_ignored or self._region.is_replaying or not is_seen():
            return func(*args)
        if facts.is_random and facts.writes_first and self._region.preserves_draws:
            raise ActivationError(
                f"{self._region.where}: cannot recompute {func.name}; because it draws random numbers into a tensor in "
                "place, which can be neither kept nor drawn again; use its out-of-place form, or keep it outside the region"
            )
        if facts.writes_first:
            self._protect_written(args)
        entries = self._region.entries.setdefault(func.name, [])
        entries.append(None)  # what an exception inside the op leaves behind
        output = func(*args)
        if facts.writes_first and compat.is_recording():
            self._note_written(args)
        reason = replay_reason(facts, args, output)
        if reason is not None and not (facts.is_random and reason == "factory"):
            self._replayed[reason] = self._replayed.get(reason, 0) + 1
            return output
        policy = self._ask(func, facts, args)
        if policy in _RECOMPUTES:
            self._recomputed_bytes += sum(tensor.nbytes for tensor in tensors_in((output,)))
        else:
            entries[-1] = self._file(policy, output, args)
        return output

    def _ask(self, func: Any, facts: OpFacts, args: Any) -> CheckpointPolicy:
        if self._answers is not None:
            known = self._answers.get(func.name)
            if known is None:
                known = self._answers[func.name] = self._region.policy(_CONTEXT, func)
        else:
            answer = self._region.policy(_CONTEXT, func, *inputs_of(args))
            known = checked_answer(answer, func, where=self._region.where)
        if facts.is_random and self._region.preserves_draws and known in _RECOMPUTES:
            self._overruled += 1
            return CheckpointPolicy.MUST_SAVE
        return known

    def _file(self, policy: CheckpointPolicy, output: Any, args: Any) -> Filed:
        pack = self._pack_swapped if policy is CheckpointPolicy.MUST_SWAP else self._pack_saved
        self._index += 1
        filed = Filed(_map_tensors(output, pack), _shapes_of(args))
        for packed in _packed_in(filed.output):
            self._region.filed_by_storage.setdefault(_key_of(packed), []).append(filed)
        return filed

    def _pack_saved(self, tensor: Any) -> Kept:
        self._saved_bytes += tensor.nbytes
        return Kept(tensor, self._region.where)

    def _pack_swapped(self, tensor: Any) -> Kept | Handle:
        packer = self._region.packer
        nbytes = int(tensor.untyped_storage().nbytes())
        engine = packer.engine_of(tensor)
        reason = None
        if nbytes == 0 or tensor.size == 0:
            reason = KeepReason.EMPTY
        elif engine is None:
            reason = KeepReason.HOST
        elif nbytes < packer.config.min_bytes:
            reason = KeepReason.SMALL
        if reason is not None or engine is None:
            SwapManager().counters.keep(reason or KeepReason.HOST, nbytes)
            return Kept(tensor, self._region.where)
        self._region.engines.add(engine)
        return packer.swap(engine, tensor, nbytes, index=self._index)

    def _note_written(self, args: Any) -> None:
        """A tensor without a past that takes values with one must have it when it is next seen."""
        written, *sources = tensors_in(args)
        is_plain = written.param_info is None and not written._requires_grad
        if is_plain and any(source._requires_grad for source in sources):
            self._written[storage_key(written)] = alias(written)

    def _refuse_lost_gradient(self, args: Any) -> None:
        for tensor in tensors_in(args):
            if self._written.pop(storage_key(tensor), None) is None or tensor._requires_grad:
                continue
            raise ActivationError(
                f"{self._region.where}: a tensor {tuple(tensor.shape)} {tensor.dtype} was filled in place and lost its gradient; "
                "because MindSpore does not record that for what mint.empty returns, where a dispatch mode looks on; use "
                "mint.zeros there"
            )

    def _protect_written(self, args: Any) -> None:
        """Rule 3, before the op runs."""
        for tensor in tensors_in(args)[:1]:
            if self._region.state is not None:
                self._region.state.before_write(tensor)
            if self._region.allows_mutation:
                continue
            for filed in self._region.filed_by_storage.pop(storage_key(tensor), ()):
                filed.is_changed_later = True
                filed.output = _map_packed(filed.output, _settled)


class ReplayMode(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Runs what was not filed, hands out what was."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._counts: dict[str, int] = {}
        self._used: list[Handle] = []
        self._changed: dict[int, str] = {}  # address of what was changed after forward -> what it is
        self._made: dict[int, Any] = {}  # address of what a factory returned -> an alias, so that it names nothing else
        self._drawing: Any = Replay(region.drawing) if region.preserves_draws else contextlib.nullcontext()

    def __enter__(self) -> ReplayMode:
        self._counts = {}
        self._used = []
        self._made = {}
        self._changed = {} if self._region.state is None else self._region.state.changed()
        self._drawing.__enter__()
        self._region.is_replaying = True
        task = current_task(self._region.position)
        if task is not None:
            for engine in self._region.engines:
                engine.expect(task)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        leaves = super().__exit__(*exc)
        self._region.is_replaying = False
        self._made = {}
        # The replayed graph holds what it still needs; our own reference would keep all of it to the region's end.
        for handle in self._used:
            handle.record.engine.let_go(handle.record)
        self._used = []
        self._drawing.__exit__(*exc)
        return leaves

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Replay one op."""
        facts = facts_of(func.name)
        if facts.is_ignored or not is_seen():
            return func(*args)
        if self._changed:
            self._refuse_changed(func, args)
        at = self._counts.get(func.name, 0)
        self._counts[func.name] = at + 1
        entries = self._region.entries.get(func.name, [])
        if at >= len(entries) and self._region.is_open:
            return self._run_ahead(func, facts, args)
        if at >= len(entries):
            raise ReplayMismatchError(
                f"{self._region.where}: the replay ran {func.name} number {at + 1} with inputs {_shapes_of(args)}, "
                f"but forward ran it {len(entries)} times. The function must run the same ops again: look for branches on "
                "data, on global state or on whether gradients are enabled."
            )
        entry = entries[at]
        if entry is None:
            output = func(*args)
            self._note_made(func, args, output)
            return output
        if self._made and self._would_wait(func, facts, args):
            return func(*args)
        refuse_second_order(self._region.where)
        inputs = _shapes_of(args)
        if inputs != entry.inputs:
            raise ReplayMismatchError(
                f"{self._region.where}: the replay ran {func.name} number {at + 1} with inputs {inputs}, but forward ran it "
                f"with {entry.inputs}; its kept output does not fit. The function must run the same ops on the same shapes "
                "and dtypes again."
            )
        if entry.is_changed_later:
            return _map_packed(entry.output, self._hand_out_copy)
        try:
            return _map_packed(entry.output, self._hand_out)
        except InPlaceChangeError:
            if facts.is_random:
                raise
        SwapManager().counters.add_to("replayed_ops", "changed_outside", 1)
        return self._unchanged_or_new(entry.output, func(*args))

    def _unchanged_or_new(self, packed: Any, new: Any) -> Any:
        """Rule 4: what nobody changed is forward's own value; the rest is what the op made again."""
        if isinstance(packed, tuple | list):
            return type(packed)(map(self._unchanged_or_new, packed, new))
        if not isinstance(packed, Kept | Handle):
            return packed
        try:
            return self._hand_out(packed)
        except InPlaceChangeError:
            return new

    def _refuse_changed(self, func: Any, args: Any) -> None:
        """Rule 7."""
        for tensor in tensors_in(args):
            label = self._changed.get(storage_key(tensor))
            if label is not None:
                raise changed_in_place(self._region.where, label, func.name)

    def _note_made(self, func: Any, args: Any, output: Any) -> None:
        """Remember what a factory made, what comes of that alone, and what item assignment put in its place."""
        read = tensors_in(args)
        if read and not self._has_made(read):
            return
        is_assignment = func.name.startswith(("TensorScatter", "Select"))
        if is_assignment or not any(tensor._requires_grad for tensor in read):
            self._made.update((storage_key(tensor), alias(tensor)) for tensor in tensors_in((output,)))

    def _has_made(self, tensors: list[Any]) -> bool:
        return any(storage_key(tensor) in self._made for tensor in tensors)

    def _would_wait(self, func: Any, facts: OpFacts, args: Any) -> bool:
        """Whether MindSpore would wait for ever for our answer.

        What a factory returned through a mode is never done being made for an older primitive that a mode answers for. Such
        an op runs again instead, which gives the same bytes, unless it draws.
        """
        if inputs_of(args) is args or not self._has_made(tensors_in(args)):
            return False
        if facts.is_random:
            raise ActivationError(
                f"{self._region.where}: cannot hand out what {func.name} drew in forward; because it was given a tensor that "
                "the region makes itself, and MindSpore would wait for that for ever; make the tensor outside the region"
            )
        return True

    def _run_ahead(self, func: Any, facts: OpFacts, args: Any) -> Any:
        """Rule 6: an op that forward has not come to."""
        if facts.is_random and self._region.preserves_draws:
            raise ActivationError(
                f"{self._region.where}: cannot take a gradient inside the region before {func.name}; because the values that it "
                "needs come from a replay of the whole region, and what that draws cannot be drawn again; take the gradient "
                "outside the region"
            )
        return func(*args)

    def _hand_out(self, packed: Kept | Handle) -> Any:
        if isinstance(packed, Kept):
            # An alias: autograd makes what is handed out a result of the replayed graph, which would then live with the entry.
            return alias(packed.tensor if self._region.allows_mutation else packed.unpack())
        self._used.append(packed)
        return packed.unpack_value(checks_version=not self._region.allows_mutation)

    def _hand_out_copy(self, packed: Kept | Handle) -> Any:
        """The replay changes this value as forward did; the filed bytes must stay for the next replay."""
        value = packed.tensor if isinstance(packed, Kept) else packed.unpack_value(checks_version=False)
        if isinstance(packed, Handle):
            self._used.append(packed)
        return copied(value)


def _settled(packed: Kept | Handle) -> Kept | Handle:
    """The same value, independent of the tensor that is about to change."""
    if isinstance(packed, Handle):
        if packed.record.engine.settle(packed.record):
            return packed
        assert packed.record.device_bytes is not None, "what has no copy is on the device"
        value = packed.view.over(packed.record.device_bytes)
    else:
        value = packed.tensor
    return Kept(copied(value), packed.where)


def _shapes_of(args: Any) -> Shapes:
    """What a replayed op must be given again for a filed output to fit."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(args)]


def _map_tensors(output: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(output, mindspore.Tensor):
        return fn(output)
    if isinstance(output, tuple | list):
        return type(output)(_map_tensors(item, fn) for item in output)
    return output


def _map_packed(packed: Any, fn: Callable[[Kept | Handle], Any]) -> Any:
    if isinstance(packed, Kept | Handle):
        return fn(packed)
    if isinstance(packed, tuple | list):
        return type(packed)(_map_packed(item, fn) for item in packed)
    return packed


def _packed_in(packed: Any) -> list[Kept | Handle]:
    if isinstance(packed, Kept | Handle):
        return [packed]
    if isinstance(packed, tuple | list):
        return [leaf for item in packed for leaf in _packed_in(item)]
    return []


def _key_of(packed: Kept | Handle) -> int:
    if isinstance(packed, Handle):
        key = packed.record.storage_key
        return -1 if key is None else key
    return storage_key(packed.tensor)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any,
    allow_cache_entry_mutation: bool = False,
    *,
    swap_config: SwapConfig | None = None,
    where: str = "checkpoint",
    position: Position | None = None,
    preserves_draws: bool = True,
    state: RegionState | None = None,
) -> tuple[ForwardMode, ReplayMode]:
    """The pair of contexts of one region, for ``mindspore.recompute(use_reentrant=False, context_fn=...)``.

    With ``allow_cache_entry_mutation`` a saved value that was changed in place is used as it is. ``state`` is told of each
    tensor that an op of forward is about to write, and of each op of the replay that reads what was changed since then.
    """
    region = Region(
        as_op_policy(policy_fn_or_list, where=where),
        where=where,
        config=swap_config,
        position=position,
        allows_mutation=allow_cache_entry_mutation,
        preserves_draws=preserves_draws,
        state=state,
    )
    return ForwardMode(region), ReplayMode(region)
