"""One block's forward, written down op by op, on MindSpore: names, bytes, who reads what, what autograd keeps.

A dispatch mode sees every op; saved-tensor hooks, inside the block only, see what autograd keeps of it, and in backward which
op's backward runs. A value is told by the address of its storage. An address is used again after its bytes died; the op that
used it last counts as the maker of what is read there.

On the CPU MindSpore gives an op a dense copy of a view, in memory that no mode has seen being made, while the view, and so the
value behind it, lives on. What is read there counts as the newest view of that shape and dtype.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.ops import facts_of, replay_reason, tensors_in
from hyper_parallel.backends.mindspore.storages import alias, is_seen, storage_key
from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.observed import SIDE_OUTPUT, ObservedCall, ObservedOp
from hyper_parallel.planner.profile import BLOCK_INPUT

__all__ = ["OpObserver"]


class OpObserver(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Writes one block call down. What it measures costs time, so bytes and seconds are read in different steps."""

    def __init__(
        self,
        block: str,
        paths: ModulePaths,
        *,
        clock: Meter | None = None,
        memory: Meter | None = None,
        on_unpack: Callable[[int], None] | None = None,
    ) -> None:
        self.seen = ObservedCall(block)
        self._paths = paths
        self._clock = clock
        self._memory = memory
        self._on_unpack = on_unpack  # is told which op's backward wants a value
        self._producers: dict[int, int] = {}  # address: op, or BLOCK_INPUT
        self._views: dict[tuple[tuple[int, ...], str], int] = {}  # by shape and dtype: the value behind the newest view
        self._copies: dict[tuple[int, Any], int] = {}  # address and shape of a view's copy: the value behind the view
        self._sizes: dict[tuple[int, int], int] = {}  # (op, address): bytes, to count what is kept once
        self._occurrences: Counter[tuple[str, bool]] = Counter()
        self._changed: set[int] = set()
        self._running = 0  # the op that runs, or that ran last

    @contextlib.contextmanager
    def watching(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Around one call of the block with these arguments."""
        for tensor in tensors_in((args, tuple(kwargs.values()))):
            self._producers[storage_key(tensor)] = BLOCK_INPUT
        called = Counter(self._paths.calls)
        hooks: Any = contextlib.nullcontext()
        if self._on_unpack is not None:
            hooks = mindspore.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, self:
            yield
        inside = f"{self.seen.block}."
        self.seen.module_calls = {
            path.removeprefix(inside): count
            for path, count in (self._paths.calls - called).items()
            if path.startswith(inside)
        }
        for index in self._changed:
            op = self.seen.ops[index]
            if op.is_keepable:
                op.is_keepable, op.reason = False, "changed_in_place"
        self._producers.clear()
        self._views.clear()
        self._copies.clear()
        self._sizes.clear()

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Run one op and write it down."""
        facts = facts_of(func.name)
        if facts.is_ignored or not is_seen():
            return func(*args)
        self._running = len(self.seen.ops)
        read = {storage_key(tensor) for tensor in tensors_in(args) if tensor.size}
        inputs = self._values_read(args)
        if facts.writes_first:
            self._note_written(args)
        if self._memory is not None:
            self._memory.reset_peak()
        start = None if self._clock is None else self._clock.mark()
        output = func(*args)
        end = None if self._clock is None else self._clock.mark()
        reason = replay_reason(facts, args, output)
        is_asked = reason is None or (facts.is_random and reason == "factory")
        seen = ObservedOp(
            name=str(func.name),
            overload="",
            module=self._module(),
            occurrence=self._occurrences[func.name, is_asked],
            is_asked=is_asked,
            is_keepable=is_asked,
            reason="" if is_asked else str(reason),
            is_random=facts.is_random,
            sequence=self._running,
            inputs=inputs,
            start=start,
            end=end,
        )
        self._occurrences[func.name, is_asked] += 1
        self._note_output(seen, read, output)
        return output

    def _values_read(self, args: Any) -> tuple[int, ...]:
        """Which values of this block an op reads."""
        found = set()
        for tensor in tensors_in(args):
            if not tensor.size or tensor.param_info is not None:
                continue
            value = self._value_at(tensor)
            if value is None and (value := self._views.get(_shape_of(tensor))) is not None:
                self._copies[storage_key(tensor), _shape_of(tensor)] = value
            if value is not None:
                found.add(value)
        return tuple(sorted(found))

    def _value_at(self, tensor: Any) -> int | None:
        """The value that lies where a tensor does, as far as it is known."""
        key = storage_key(tensor)
        return self._producers.get(key, self._copies.get((key, _shape_of(tensor))))

    def _note_written(self, args: Any) -> None:
        for tensor in tensors_in(args)[:1]:
            producer = self._producers.get(storage_key(tensor), BLOCK_INPUT)
            if producer != BLOCK_INPUT:
                self._changed.add(producer)

    def _module(self) -> str:
        stack = self._paths.stack
        path = stack[-1] if stack else self.seen.block
        return path.removeprefix(self.seen.block).removeprefix(".")

    def _note_output(self, seen: ObservedOp, read: set[int], output: Any) -> None:
        index = len(self.seen.ops)
        self.seen.ops.append(seen)
        shared: int | None = None
        for tensor in tensors_in((output,)):
            if not tensor.size:
                continue
            key, nbytes = storage_key(tensor), int(tensor.untyped_storage().nbytes())
            if key in read:
                value = self._value_at(tensor)
                shared = shared if value is None else value
                if shared is not None:
                    self._views[_shape_of(tensor)] = shared
                continue
            self._producers[key] = index
            if (index, key) not in self._sizes:
                self._sizes[index, key] = nbytes
                seen.output_bytes += nbytes
        if not seen.output_bytes:
            seen.alias = shared
        if self._memory is not None:
            seen.workspace_bytes = max(0, self._memory.peak_bytes() - self._memory.active_bytes())

    # ------------------------------------------------------------------ what autograd keeps

    def _pack(self, tensor: Any) -> Any:
        reader, key = self._running, storage_key(tensor)
        producer = self._producers.get(key)
        if producer is not None and tensor.size:
            self._note_kept(producer, reader, key, int(tensor.untyped_storage().nbytes()))
        return alias(tensor), reader

    def _note_kept(self, producer: int, reader: int, key: int, nbytes: int) -> None:
        if producer == BLOCK_INPUT:
            self.seen.input_kept_by.add(reader)
        elif producer < len(self.seen.ops):
            op = self.seen.ops[producer]
            if nbytes * SIDE_OUTPUT >= op.output_bytes:
                op.kept_by.add(reader)
            op.kept_bytes += self._sizes.pop((producer, key), 0)

    def _unpack(self, packed: Any) -> Any:
        tensor, reader = packed
        assert self._on_unpack is not None, "the hooks are there for it"
        self._on_unpack(reader)
        return alias(tensor)


def _shape_of(tensor: Any) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)
