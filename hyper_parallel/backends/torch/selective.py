"""Selective checkpointing: one region, every op instance saved, swapped or recomputed.

A pair of dispatch modes behind torch's own non-reentrant checkpoint. The forward mode runs each op, asks the policy
once and files what became of the output under (op, how many of that op came before). The replay mode looks the same key
up. Entries are not consumed, so a second backward, a double backward and a retry after an exception find them again.

Rules
-----
1. Views, in-place ops, factories and ``c10d`` collectives are replayed whatever the policy says (``ops``).
2. A random op that the replay skips leaves the random stream behind; every later random op that *is* replayed gets the
   state it had in forward, and the stream is put back when the replay ends. An op that is not torch's own may draw
   without saying so, and counts as random.
3. An in-place op that changes a filed output is seen by the forward mode before it runs. A swapped one is ordered after
   its copy out, a saved one is copied first; the replay then hands out a copy, because it will apply the same change again.
4. A change that happens outside the region, after it ended, shows in the version counter. The replay then runs the op again,
   from the random state that it had, because its kept bytes are gone. What cannot be run again (a collective, an op that
   draws from a generator of the caller's) raises.
5. Our own tensor ops run unseen, so that an outer region's counting is not shifted.
6. A gradient taken inside a region (a penalty, a meta step) is a backward of its own, and makes torch replay regions while
   a forward still runs. A mode counts what belongs to the backward, or to none, in which it was entered; all else runs
   again in the replay, which in turn runs what an open forward has not come to yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.graph import current_task, next_sequence
from hyper_parallel.backends.torch.ops import KNOWN, OpFacts, facts_of, is_weight_cast
from hyper_parallel.backends.torch.packed import Handle, Kept
from hyper_parallel.backends.torch.random_state import RandomState, Source, set_state
from hyper_parallel.backends.torch.saved_tensors import Packer
from hyper_parallel.backends.torch.storages import (
    alias,
    is_copied_by_bytes,
    tensors_in,
    unseen,
)
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.policy import (
    ByOpName,
    PolicyContext,
    as_op_policy,
    checked_answer,
    op_label,
)
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import InPlaceChangeError, PolicyError, ReplayMismatchError, SwapImpossibleError
from hyper_parallel.platform.torch import compat

__all__ = ["ForwardMode", "Region", "ReplayMode", "create_selective_checkpoint_contexts"]

_RECOMPUTES = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})
_CONTEXT = PolicyContext()
_current_task = torch._C._current_graph_task_id  # -1: no backward runs on this thread

Inputs = list[tuple[torch.Size | None, torch.dtype]]


class Replayed:
    """An op instance that the replay runs again."""

    __slots__ = ("random_state",)

    def __init__(self, random_state: RandomState | None) -> None:
        self.random_state = random_state


_REPLAYED = Replayed(None)


class Filed:
    """An op instance whose output the replay hands out."""

    __slots__ = ("inputs", "is_changed_later", "output", "random_state")

    def __init__(self, output: Any, inputs: Inputs, random_state: RandomState | None) -> None:
        self.output = output  # the op's output with every tensor packed
        self.inputs = inputs
        self.is_changed_later = False
        self.random_state = random_state  # before the op ran, if it may draw; rule 4


class Region:
    """One call of a checkpointed function: what became of each op instance."""

    def __init__(
        self,
        policy: Any,
        *,
        where: str,
        config: SwapConfig | None = None,
        position: Position | None = None,
        allows_mutation: bool = False,
    ) -> None:
        self.policy = policy
        self.where = where
        self.position = position if position is not None else Position(next_sequence())
        self.allows_mutation = allows_mutation
        self.entries: dict[int, list[Replayed | Filed]] = {}  # by the op's id; the table of known ops keeps it alive
        self.filed_by_storage: dict[int, list[Filed]] = {}
        self.fresh: list[Kept] = []  # hold the op's very output; aliased when forward is over (see close)
        self.packer = Packer(config=config, where=where, position=self.position)
        self.engines: set[Engine] = set()
        self.is_open = True  # forward still runs

    def close(self) -> None:
        """Forward is over: from here the region's values are wanted when backward reaches its last node."""
        self.is_open = False
        self.position.sequence = next_sequence()
        self.filed_by_storage = {}
        # An output that the region held to the end would be a cycle: output, its node, this region. An alias is none, and
        # one made here, above autograd, shares the version counter for a tenth of what it costs inside the mode.
        for kept in self.fresh:
            kept.tensor = alias(kept.tensor)
        self.fresh = []
        self.packer.flush()
        SwapManager().relieve()


class _RegionMode(TorchDispatchMode):
    """What both modes of a region tell the compiler: code compiled inside stays compiled, the modes are passed over."""

    supports_higher_order_operators = True  # flex_attention, cond: one op each, whatever runs inside

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo would otherwise skip every frame under a foreign mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        dispatch = cls.__dict__.get("__torch_dispatch__")
        return dispatch is None or not compat.skip_in_compiler(dispatch)


class ForwardMode(_RegionMode):
    """Runs each op and files what becomes of its output."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._answers: dict[Any, CheckpointPolicy] | None = {} if isinstance(region.policy, ByOpName) else None
        self._has_skipped_random = False
        self._recomputed_bytes = 0
        self._saved_bytes = 0
        self._entries = region.entries
        self._index = 0
        self._task = -1

    def __enter__(self) -> ForwardMode:
        if not self._region.is_open:
            raise PolicyError(
                f"{self._region.where}: cannot run a second forward under this pair of contexts, because its replay would be "
                "handed the first one's values. Give context_fn a function that makes a new pair for every call."
            )
        self._task = _current_task()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._region.close()
        counters = SwapManager().counters
        counters.add("recomputed_bytes", self._recomputed_bytes)
        counters.add("saved_bytes", self._saved_bytes)
        for key, entries in self._entries.items():
            reason = KNOWN[key].replay_reason
            if reason is not None:
                counters.add_to("replayed_ops", reason, len(entries))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        facts = KNOWN.get(id(op)) or facts_of(op)
        if kwargs is None:
            kwargs = {}
        if facts.is_ignored or (facts.may_be_weight_cast and is_weight_cast(args)):
            return facts.run(*args, **kwargs)
        if (facts.writes or facts.writes_anything) and not self._region.allows_mutation:
            self._protect_written(facts, args, kwargs)
        if _current_task() != self._task:  # rule 6
            return facts.run(*args, **kwargs)
        entries = self._entries.get(id(op))
        if entries is None:
            entries = self._entries[id(op)] = []
        # Nothing that is made in inference mode can be saved for backward, and it has no version.
        if facts.replay_reason is not None or torch.is_inference_mode_enabled():
            entries.append(self._replayed_entry(facts, args, kwargs) if facts.may_draw else _REPLAYED)
            return facts.run(*args, **kwargs)
        policy = self._ask(op, args, kwargs)
        if policy in _RECOMPUTES:
            entries.append(self._replayed_entry(facts, args, kwargs) if facts.may_draw else _REPLAYED)
            output = facts.run(*args, **kwargs)
            self._recomputed_bytes += _bytes_of(output)
            return output
        entries.append(_REPLAYED)  # what an exception inside the op leaves behind
        state = RandomState.now(args, kwargs, is_opaque=not facts.is_random) if facts.may_draw else None
        output = facts.run(*args, **kwargs)
        self._has_skipped_random |= facts.may_draw
        entries[-1] = self._file(op, policy, output, Filed(None, _inputs_of(args), state))
        return output

    def _ask(self, op: Any, args: Any, kwargs: dict[str, Any]) -> CheckpointPolicy:
        if self._answers is not None:
            known = self._answers.get(op)
            if known is None:
                known = self._answers[op] = self._region.policy(_CONTEXT, op)
            return known
        answer = self._region.policy(_CONTEXT, op, *args, **kwargs)
        return checked_answer(answer, op, where=self._region.where)

    def _replayed_entry(self, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> Replayed:
        """Rule 2: only once the replay would be out of step is a state worth keeping."""
        if self._has_skipped_random:
            return Replayed(RandomState.now(args, kwargs, is_opaque=not facts.is_random))
        return _REPLAYED

    def _file(self, op: Any, policy: CheckpointPolicy, output: Any, filed: Filed) -> Filed:
        pack = self._pack_swapped if policy is CheckpointPolicy.MUST_SWAP else self._pack_saved
        self._index += 1
        packed: Any
        if isinstance(output, torch.Tensor):
            packed = pack(op, output)
        elif isinstance(output, tuple | list):
            packed = type(output)(pack(op, item) if isinstance(item, torch.Tensor) else item for item in output)
        else:
            packed = output
        filed.output = packed
        for leaf in _packed_leaves(packed):
            key = _storage_key(leaf)
            if key is not None:
                self._region.filed_by_storage.setdefault(key, []).append(filed)
        return filed

    def _pack_saved(self, op: Any, tensor: torch.Tensor) -> Kept:
        self._saved_bytes += _bytes_of(tensor)
        return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Kept:
        kept = Kept(tensor, tensor._version, self._region.where)
        self._region.fresh.append(kept)
        return kept

    def _pack_swapped(self, op: Any, tensor: torch.Tensor) -> Kept | Handle:
        packer, counters = self._region.packer, SwapManager().counters
        if tensor.layout is not torch.strided:
            raise SwapImpossibleError(
                f"{self._region.where}: cannot swap the output of {op_label(op)}, a {tensor.layout} tensor, because it has no "
                "storage of its own. Let the policy answer MUST_SAVE or MUST_RECOMPUTE for it."
            )
        if type(tensor) is not torch.Tensor or not is_copied_by_bytes(tensor, tensor.untyped_storage()):
            counters.keep(KeepReason.EXOTIC, tensor.nbytes)
            return self._keep(tensor)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        engine = packer.engine_of(tensor.device)
        reason = None
        if nbytes == 0:
            reason = KeepReason.EMPTY
        elif engine is None:
            reason = KeepReason.HOST
        elif nbytes < packer.config.min_bytes:
            reason = KeepReason.SMALL
        if reason is not None or engine is None:
            counters.keep(reason or KeepReason.HOST, nbytes)
            return self._keep(tensor)
        self._region.engines.add(engine)
        return packer.swap(engine, tensor, storage, nbytes, index=self._index, is_below_autograd=True)

    def _protect_written(self, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> None:
        """Rule 3, before the op runs."""
        filed_by_storage = self._region.filed_by_storage
        if not filed_by_storage:
            return
        if facts.writes_anything:
            written: list[Any] = [*args, *kwargs.values()]
        else:
            written = [
                kwargs.get(at) if isinstance(at, str) else (args[at] if at < len(args) else None) for at in facts.writes
            ]
        for tensor in tensors_in(written):
            if not _has_storage(tensor):
                continue
            for filed in filed_by_storage.pop(tensor.untyped_storage()._cdata, ()):
                self._protect(filed)

    def _protect(self, filed: Filed) -> None:
        filed.is_changed_later = True
        filed.output = _map_packed(filed.output, _settled)


class _Run:
    """One replay: how far it is, and what it took."""

    __slots__ = ("counts", "displaced", "task", "used")

    def __init__(self) -> None:
        self.task = _current_task()
        self.counts: dict[int, int] = {}
        self.used: list[Handle] = []
        self.displaced: dict[Source, Any] = {}  # the random states that rule 2 overwrote


class _ThisThread(threading.local):
    """The replays of one region that this thread is in: two backwards of one graph may run at once."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []


class ReplayMode(_RegionMode):
    """Runs what was not filed, hands out what was."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self._entries = region.entries
        self._here = _ThisThread()

    def __enter__(self) -> ReplayMode:
        self._here.runs.append(_Run())
        task = current_task()
        if task is not None:
            SwapManager().expect(task, self._region.engines)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        run = self._here.runs.pop()
        # The replayed graph holds what it still needs; our own reference would keep all of it to the region's end.
        for handle in run.used:
            handle.record.engine.let_go(handle.record)
        # Torch puts back what it knows of: nothing without preserve_rng_state, and only the devices of the inputs with it.
        for source, state in run.displaced.items():
            set_state(source, state)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replay one op."""
        facts = KNOWN.get(id(op)) or facts_of(op)
        if kwargs is None:
            kwargs = {}
        if facts.is_ignored or (facts.may_be_weight_cast and is_weight_cast(args)):
            return facts.run(*args, **kwargs)
        runs = self._here.runs
        if not runs or runs[-1].task != _current_task():  # rule 6
            return facts.run(*args, **kwargs)
        run = runs[-1]
        at = run.counts.get(id(op), 0)
        run.counts[id(op)] = at + 1
        entries = self._entries.get(id(op), ())
        if at >= len(entries):
            if self._region.is_open:
                return facts.run(*args, **kwargs)
            raise ReplayMismatchError(
                f"{self._region.where}: the replay ran {op_label(op)} number {at + 1} with inputs {_inputs_of(args)}, "
                f"but forward ran it {len(entries)} times. The function must run the same ops again: look for branches on "
                "data, on global state or on whether gradients are enabled."
            )
        entry = entries[at]
        if entry is _REPLAYED:
            return facts.run(*args, **kwargs)
        if isinstance(entry, Replayed):
            assert entry.random_state is not None, "an entry of its own has a state"
            entry.random_state.restore(run.displaced)
            return facts.run(*args, **kwargs)
        inputs = _inputs_of(args)
        if inputs != entry.inputs:
            raise ReplayMismatchError(
                f"{self._region.where}: the replay ran {op_label(op)} number {at + 1} with inputs {inputs}, but forward ran it "
                f"with {entry.inputs}; its kept output does not fit. The function must run the same ops on the same shapes "
                "and dtypes again."
            )
        # While forward still runs its values are live, and the replay may run ahead of it to an op that changes one.
        if entry.is_changed_later or self._region.is_open:
            return _map_packed(entry.output, self._hand_out_copy)
        try:
            return _map_packed(entry.output, self._hand_out)
        except InPlaceChangeError:
            if not facts.can_run_again or _has_generator(args, kwargs):
                raise
        return self._run_again(facts, entry, args, kwargs)

    def _run_again(self, facts: OpFacts, entry: Filed, args: Any, kwargs: dict[str, Any]) -> Any:
        """Rule 4."""
        if entry.random_state is not None:
            entry.random_state.restore(self._here.runs[-1].displaced)
        SwapManager().counters.add_to("replayed_ops", "changed_outside", 1)
        return self._unchanged_or_new(entry.output, facts.run(*args, **kwargs))

    def _unchanged_or_new(self, packed: Any, new: Any) -> Any:
        """What nobody changed is forward's own value; the rest is what the op made again."""
        if isinstance(packed, tuple | list):
            return type(packed)(map(self._unchanged_or_new, packed, new))
        if not isinstance(packed, Kept | Handle):
            return packed
        try:
            return self._hand_out(packed)
        except InPlaceChangeError:
            return new

    def _hand_out(self, packed: Kept | Handle) -> torch.Tensor:
        if isinstance(packed, Kept):
            value = packed.tensor if self._region.allows_mutation else packed.unpack()
        else:
            self._here.runs[-1].used.append(packed)
            value = packed.unpack_value(checks_version=not self._region.allows_mutation)
        # An alias: autograd makes what is handed out a result of the replayed graph, which would then live with the entry.
        # With the entry's counter: a backward may return it as a gradient, and a change of that must not go unseen.
        return alias(value, is_below_autograd=True)

    def _hand_out_copy(self, packed: Kept | Handle) -> torch.Tensor:
        """The replay changes this value as forward did; the filed bytes must stay for the next replay."""
        value = packed.tensor if isinstance(packed, Kept) else packed.unpack_value(checks_version=False)
        if isinstance(packed, Handle):
            self._here.runs[-1].used.append(packed)
        with unseen():
            return value.clone()


def _settled(packed: Kept | Handle) -> Kept | Handle:
    """The same value, independent of the tensor that is about to change."""
    if isinstance(packed, Handle):
        if packed.record.engine.settle(packed.record):
            return packed
        value = packed.view.over(packed.record.device_bytes)
    else:
        value = packed.tensor
    with torch.inference_mode(False), unseen():  # the change may stand in such a block; the copy outlives it
        copy = value.clone()
    return Kept(copy, copy._version, packed.where)


def _has_generator(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _bytes_of(output: Any) -> int:
    if isinstance(output, torch.Tensor):
        return output.nbytes if output.layout is torch.strided else 0
    if isinstance(output, tuple | list):
        return sum(_bytes_of(item) for item in output)
    return 0


def _inputs_of(args: Any) -> Inputs:
    """What a replayed op must be given again for a filed output to fit."""
    # A nested tensor's ragged size is a new symbol in every call.
    return [(None if tensor.is_nested else tensor.shape, tensor.dtype) for tensor in tensors_in(args)]


def _packed_leaves(packed: Any) -> list[Kept | Handle]:
    if isinstance(packed, Kept | Handle):
        return [packed]
    if isinstance(packed, tuple | list):
        return [leaf for item in packed for leaf in _packed_leaves(item)]
    return []


def _map_packed(packed: Any, fn: Callable[[Kept | Handle], Any]) -> Any:
    if isinstance(packed, Kept | Handle):
        return fn(packed)
    if isinstance(packed, tuple | list):
        return type(packed)(_map_packed(item, fn) for item in packed)
    return packed


def _storage_key(packed: Kept | Handle) -> int | None:
    if isinstance(packed, Handle):
        return packed.record.storage_key
    return packed.tensor.untyped_storage()._cdata if _has_storage(packed.tensor) else None


def _has_storage(tensor: torch.Tensor) -> bool:
    # A subclass that leaves dispatch alone is a tensor like any other.
    is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_plain and tensor.layout is torch.strided


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any,
    allow_cache_entry_mutation: bool = False,
    *,
    swap_config: SwapConfig | None = None,
    where: str = "checkpoint",
    position: Position | None = None,
) -> tuple[ForwardMode, ReplayMode]:
    """The pair of contexts of one region, for ``torch.utils.checkpoint.checkpoint(context_fn=...)``.

    With ``allow_cache_entry_mutation`` a saved value that was changed in place is used as it is.
    """
    region = Region(
        as_op_policy(policy_fn_or_list, where=where),
        where=where,
        config=swap_config,
        position=position,
        allows_mutation=allow_cache_entry_mutation,
    )
    return ForwardMode(region), ReplayMode(region)
