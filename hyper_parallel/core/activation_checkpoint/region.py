"""A region with a policy: every op instance saved, swapped or recomputed. The part that does not depend on the framework.

A pair of dispatch modes, of which each framework has its own, runs around the function. The forward mode is a
:class:`RegionForward`: it runs each op, asks the policy once and files what became of the output under (op, how many of that
op came before). The replay mode is a :class:`RegionReplay`: it looks the same key up. Entries are not consumed, so that a
second backward and a retry after an exception find them again.

Rules
-----
1. Views, in-place ops, factories and collectives are replayed whatever the policy says (``ops`` of each framework).
2. What a replay draws must be what forward drew. How, is an exception of each framework (``selective``).
3. An in-place op that changes a filed output is seen by the forward mode before it runs. A swapped one is ordered after
   its copy out, a saved one is copied first; the replay then hands out a copy, because it will apply the same change again.
4. A change that happens outside the region, after it ended, shows in the version counter. The replay then runs the op again,
   because its kept bytes are gone. What cannot be run again raises.
5. Our own tensor ops are hidden from dispatch modes, so that an outer region's counting is not shifted.
6. A gradient taken inside a region makes the framework replay regions while a forward still runs. Such ops are not filed,
   and a replay runs what an open forward has not come to yet.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from hyper_parallel.core.activation_checkpoint.adapter import Tensor
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed, SwappedValue, map_packed, packed_in
from hyper_parallel.core.activation_checkpoint.packer import Packer
from hyper_parallel.core.activation_checkpoint.policy import PolicyContext, PolicyTable, fate_of_op, op_label
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import InPlaceChangeError, PolicyError, ReplayMismatchError
from hyper_parallel.fates import Fate

__all__ = ["AHEAD", "REPLAYED", "Displaced", "Filed", "Region", "RegionForward", "RegionReplay", "Replayed", "Run"]

Displaced = dict[Hashable, Callable[[], None]]
"""By random source: what puts it back to where it was before a replay moved it."""

_CONTEXT: Final = PolicyContext()
_SWAP: Final = Fate.SWAP


class DrawState(Protocol):
    """The state of the random sources before one op."""

    def restore(self, displaced: Displaced) -> None:
        """Put the sources back to it; how to undo that goes to ``displaced``, once for each source."""


class Replayed:
    """An op instance that the replay runs again."""

    __slots__ = ("draw_state",)

    def __init__(self, draw_state: DrawState | None) -> None:
        self.draw_state = draw_state


REPLAYED: Final = Replayed(None)
AHEAD: Final = Replayed(None)
"""Stands for an op that an open forward has not come to yet."""


class Filed:
    """An op instance whose output the replay hands out."""

    __slots__ = ("draw_state", "inputs", "is_changed_later", "output")

    def __init__(self, output: Any, inputs: list[Any], draw_state: DrawState | None) -> None:
        self.output = output  # the op's output with every tensor packed
        self.inputs = inputs
        self.is_changed_later = False
        self.draw_state = draw_state  # before the op ran, if it may draw; rule 4


class Region:
    """One call of a checkpointed function: what became of each op instance."""

    def __init__(self, policy: Any, packer: Packer, *, allows_mutation: bool = False) -> None:
        assert packer.position is not None, "the values of a region are wanted at its end"
        self.policy = policy
        self.packer = packer
        self.tensors = packer.tensors
        self.scope = packer.scope
        self.where = packer.scope.where
        self.position = packer.position
        self.allows_mutation = allows_mutation
        self.entries: dict[Hashable, list[Replayed | Filed]] = {}
        self.filed_by_storage: dict[int, list[Filed]] = {}
        self.outputs: list[KeptValue] = []  # may hold the op's very output while forward runs (see close)
        self.engines: set[Engine] = set()
        self.is_open = True  # forward still runs

    def close(self) -> None:
        """Forward is over: from here the region's values are wanted when backward reaches its last node."""
        tensors = self.tensors
        self.is_open = False
        self.position.sequence = tensors.next_sequence()
        self.filed_by_storage = {}
        # An output that the region held to the end would be a cycle: output, its node, this region. An alias makes none.
        for kept in self.outputs:
            kept.tensor, kept.token = tensors.held_after_forward(kept.tensor, kept.token)
        self.outputs = []
        self.packer.flush()
        SwapManager().trim_windows()


class RegionForward:
    """The forward of a region: asks the policy, and files what becomes of each output. The base of a dispatch mode."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._entries = region.entries
        self._answers: dict[Hashable, Fate | Callable[[], Fate]] | None = (
            {} if isinstance(region.policy, PolicyTable) else None
        )
        self._recomputed_bytes = 0
        self._saved_bytes = 0
        self._index = 0

    def _begin_forward(self) -> None:
        if not self._region.is_open:
            raise PolicyError(
                f"{self._region.where}: cannot run a second forward under this pair of contexts, because its replay would be "
                "handed the first one's values. Give context_fn a function that makes a new pair for every call."
            )

    def _end_forward(self, replayed_ops: Mapping[str, int]) -> None:
        """Close the region and count. ``replayed_ops``: how many ops run again whatever the policy says, by reason."""
        self._region.close()
        counters = SwapManager().counters
        counters.add("recomputed_bytes", self._recomputed_bytes)
        counters.add("saved_bytes", self._saved_bytes)
        for reason, count in replayed_ops.items():
            counters.add_to("replayed_ops", reason, count)

    def _fate_of(self, key: Hashable, op: Any, args: Any, kwargs: dict[str, Any]) -> Fate:
        """The policy's answer for one op instance. A table is asked once for each op."""
        region, answers = self._region, self._answers
        if answers is None:
            return fate_of_op(region.policy(_CONTEXT, op, *args, **kwargs), op, where=region.where)
        fate = answers.get(key)
        if fate is None:
            fate = answers[key] = self._look_up(op)
        return fate if isinstance(fate, Fate) else fate()

    def _look_up(self, op: Any) -> Fate | Callable[[], Fate]:
        """What a table answers for every instance of an op, or a function that answers for the next one."""
        where, given = self._region.where, self._region.policy.answers_for(op)
        if isinstance(given, Mapping):
            fates = {at: fate_of_op(answer, op, where=where) for at, answer in given.items()}
            count = itertools.count()
            return lambda: fates.get(next(count), Fate.RECOMPUTE)
        if callable(given):
            return lambda: fate_of_op(given(), op, where=where)
        return fate_of_op(given, op, where=where)

    def _file(self, op: Any, fate: Fate, output: Any, args: Any, draw_state: DrawState | None = None) -> Filed:
        """Pack an op's output, and make it findable for an op that is about to change it."""
        region = self._region
        tensors = region.tensors
        self._index += 1
        pack = self._swap_output if fate is _SWAP else self._save_output
        packed = pack(op, output) if tensors.is_tensor(output) else self._pack_items(op, pack, output)
        filed = Filed(packed, tensors.shapes_of(args), draw_state)
        for leaf in packed_in(packed):
            key = leaf.storage_key()
            if key is not None:
                region.filed_by_storage.setdefault(key, []).append(filed)
        return filed

    def _pack_items(self, op: Any, pack: Callable[[Any, Tensor], Packed], output: Any) -> Any:
        if not isinstance(output, tuple | list):
            return output
        is_tensor = self._region.tensors.is_tensor
        return type(output)(pack(op, item) if is_tensor(item) else self._pack_items(op, pack, item) for item in output)

    def _save_output(self, op: Any, tensor: Tensor) -> KeptValue:
        self._saved_bytes += self._region.tensors.bytes_of(tensor)
        return self._keep_output(tensor)

    def _keep_output(self, tensor: Tensor) -> KeptValue:
        region = self._region
        held, token = region.tensors.held_output(tensor)
        kept = KeptValue(held, token, token._version, region.scope)
        region.outputs.append(kept)
        return kept

    def _swap_output(self, op: Any, tensor: Tensor) -> Packed:
        region = self._region
        swapped = region.packer.swap_output(tensor, self._index)
        if swapped is None:
            return self._keep_output(tensor)
        region.engines.add(swapped.record.engine)
        return swapped

    def _protect_written(self, written: Iterable[Tensor]) -> None:
        """Rule 3, before the op runs."""
        region = self._region
        for tensor in written:
            key = region.tensors.storage_key_if_any(tensor)
            for filed in () if key is None else region.filed_by_storage.pop(key, ()):
                self._before_change(filed)
                filed.is_changed_later = True
                filed.output = map_packed(filed.output, self._independent)

    def _before_change(self, filed: Filed) -> None:
        """An op is about to change a filed output. Nothing to do, unless a framework looks for other changes of it."""

    def _independent(self, packed: Packed) -> Packed:
        """The same value, independent of the tensor that is about to change."""
        if isinstance(packed, SwappedValue):
            record = packed.record
            if record.engine.finish_copy_before_write(record):
                return packed
            assert record.device_bytes is not None, "what has no copy is on the device"
            value = packed.source.over(record.device_bytes)
        else:
            value = packed.tensor
        return KeptValue.of(self._region.tensors.clone(value), packed.scope)


class Run:
    """One replay: which backward it belongs to, how far it is, and what it took."""

    __slots__ = ("cursors", "displaced", "task", "used")

    def __init__(self, task: Any, entries: Mapping[Hashable, list[Replayed | Filed]]) -> None:
        self.task = task
        self.cursors: dict[Hashable, Iterator[Replayed | Filed]] = {key: iter(of_op) for key, of_op in entries.items()}
        self.used: list[SwappedValue] = []
        self.displaced: Displaced = {}  # the random sources that rule 2 moved


class _ThisThread(threading.local):
    """The replays of one region that this thread is in: two backwards of one graph may run at once."""

    def __init__(self) -> None:
        self.runs: list[Run] = []


class RegionReplay:
    """A replay of a region: runs what was not filed, hands out what was. The base of a dispatch mode."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._entries = region.entries
        self._here = _ThisThread()

    def _can_run_again(self, op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an op whose kept output is gone may be run again."""
        raise NotImplementedError

    def _begin_replay(self, task_key: Any = None) -> None:
        self._here.runs.append(Run(task_key, self._entries))
        region = self._region
        task = region.tensors.current_task(region.position)
        if task is not None:
            SwapManager().start_prefetch(task, region.engines)

    def _end_replay(self) -> None:
        run = self._here.runs.pop()
        # The replayed graph holds what it still needs; our own reference would keep all of it to the region's end.
        for swapped in run.used:
            swapped.record.engine.drop_after_replay(swapped.record)
        for put_back in run.displaced.values():
            put_back()

    def _entry_past_the_end(self, key: Hashable, op: Any, args: Any) -> Replayed:
        """The entry of an op instance that forward has not filed: forward has not come to it, or the replay differs."""
        if self._region.is_open:
            return AHEAD
        count = len(self._entries.get(key, ()))
        raise ReplayMismatchError(
            f"{self._region.where}: the replay ran {op_label(op)} number {count + 1} with inputs "
            f"{self._region.tensors.shapes_of(args)}, but forward ran it {count} times. The function must run the same ops "
            "again: look for branches on data, on global state or on whether gradients are enabled."
        )

    def _output_of(
        self,
        run: Run,
        entry: Filed,
        key: Hashable,
        op: Any,
        call: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """The filed output of an op instance. ``call`` runs the op, where its kept bytes are gone."""
        region = self._region
        inputs = region.tensors.shapes_of(args)
        if inputs != entry.inputs:
            number = self._entries[key].index(entry) + 1
            raise ReplayMismatchError(
                f"{region.where}: the replay ran {op_label(op)} number {number} with inputs {inputs}, but forward ran it "
                f"with {entry.inputs}; its kept output does not fit. The function must run the same ops on the same shapes "
                "and dtypes again."
            )
        # While forward still runs its values are live, and the replay may run ahead of it to an op that changes one.
        if entry.is_changed_later or region.is_open:
            return map_packed(entry.output, self._hand_out_copy)
        try:
            return map_packed(entry.output, self._hand_out)
        except InPlaceChangeError:
            if not self._can_run_again(op, args, kwargs):
                raise
        if entry.draw_state is not None:  # rule 4
            entry.draw_state.restore(run.displaced)
        SwapManager().counters.add_to("replayed_ops", "changed_outside", 1)
        return self._unchanged_or_new(entry.output, call(*args, **kwargs))

    def _unchanged_or_new(self, packed: Any, new: Any) -> Any:
        """What was not changed is forward's own value; the rest is what the op made again."""
        if isinstance(packed, tuple | list):
            return type(packed)(map(self._unchanged_or_new, packed, new))
        if not isinstance(packed, KeptValue | SwappedValue):
            return packed
        try:
            return self._hand_out(packed)
        except InPlaceChangeError:
            return new

    def _hand_out(self, packed: Packed) -> Tensor:
        region = self._region
        if isinstance(packed, KeptValue):
            value = packed.tensor if region.allows_mutation else packed.unpack()
        else:
            self._here.runs[-1].used.append(packed)
            value = packed.unpack_value(checks_version=not region.allows_mutation)
        # An alias: autograd makes what is handed out a result of the replayed graph, which would then live with the entry.
        # It shares the entry's counter: a backward may return it as a gradient, and a change of that must be noticed.
        return region.tensors.alias(value, is_below_autograd=True)

    def _hand_out_copy(self, packed: Packed) -> Tensor:
        """The replay changes this value as forward did; the filed bytes must stay for the next replay."""
        if isinstance(packed, KeptValue):
            value = packed.tensor
        else:
            self._here.runs[-1].used.append(packed)
            value = packed.unpack_value(checks_version=False)
        return self._region.tensors.clone(value)
