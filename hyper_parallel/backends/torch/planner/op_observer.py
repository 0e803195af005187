"""One block's forward, written down op by op: names, bytes, who reads what, what autograd keeps, and how long each took.

A dispatch mode sees every op. Saved-tensor hooks, inside the block only, see what autograd keeps of it. A value is told by
its storage; views are followed to the op that made the bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.module_paths import ModulePaths
from hyper_parallel.backends.planning.observed import SIDE_OUTPUT, ObservedCall, ObservedOp
from hyper_parallel.backends.torch.graph import next_sequence
from hyper_parallel.backends.torch.op_names import op_name, op_overload
from hyper_parallel.backends.torch.ops import facts_of, is_weight_cast
from hyper_parallel.backends.torch.storages import alias, storage_watch
from hyper_parallel.planner.profile import BLOCK_INPUT

__all__ = ["ObservedCall", "OpObserver", "ObservedOp", "plain_tensors"]


def plain_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree that have a storage of their own."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    found = []
    for leaf in leaves:
        local = getattr(leaf, "_local_tensor", leaf)
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout is torch.strided:
            found.append(local)
    return found


class OpObserver(TorchDispatchMode):
    """Writes one block call down. What it measures costs time, so bytes and seconds are read in different steps."""

    def __init__(
        self,
        block: str,
        paths: ModulePaths,
        *,
        clock: Meter | None = None,
        memory: Meter | None = None,
        is_compiled: bool = False,
    ) -> None:
        super().__init__()
        self.seen = ObservedCall(block)
        self._paths = paths
        self._clock = clock
        self._memory = memory
        self._is_compiled = is_compiled  # a traced graph has casts of weights like any other op, and counts them
        self._producers: dict[int, int] = {}  # storage key: op, or BLOCK_INPUT
        self._watches: list[Any] = []  # while a storage is watched its key names no other
        self._sizes: dict[tuple[int, int], int] = {}  # (op, storage key): bytes, to count what is kept once
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._changed: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    @contextlib.contextmanager
    def watching(self, args: Any, kwargs: Any, *, sees_saved: bool) -> Iterator[None]:
        """Around one call of the block with these arguments."""
        for tensor in plain_tensors((args, kwargs)):
            storage = tensor.untyped_storage()
            self.seen.input_storages[storage._cdata] = storage.nbytes()
            self._producers[storage._cdata] = BLOCK_INPUT
            self._watches.append(storage_watch(storage))
        self.seen.first_sequence = next_sequence()
        called = Counter(self._paths.calls)
        hooks = saved_tensors_hooks(self._pack, _unpack) if sees_saved else contextlib.nullcontext()
        with hooks, self:
            yield
        self.seen.last_sequence = next_sequence()
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
        self._watches.clear()
        self._sizes.clear()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op and write it down."""
        kwargs = kwargs or {}
        facts = facts_of(op)
        if facts.is_ignored:
            return op(*args, **kwargs)
        seen = self._begin(op, facts, args, kwargs)
        if self._memory is not None:
            self._memory.reset_peak()
        if self._clock is not None:
            seen.start = self._clock.mark()
        output = op(*args, **kwargs)
        if self._clock is not None:
            seen.end = self._clock.mark()
        self._end(seen, facts, output)
        if self._memory is not None:
            seen.workspace_bytes = max(0, self._memory.peak_bytes() - self._memory.active_bytes())
        return output

    def _begin(self, op: Any, facts: Any, args: Any, kwargs: Any) -> ObservedOp:
        is_cast = facts.may_be_weight_cast and is_weight_cast(args)
        is_asked = facts.replay_reason is None and not is_cast
        key = ("weight_cast" if is_cast and not self._is_compiled else op_name(op), op_overload(op))
        read = [tensor.untyped_storage()._cdata for tensor in plain_tensors((args, kwargs))]
        self._read = read
        seen = ObservedOp(
            name=key[0],
            overload=key[1],
            module=self._module(),
            occurrence=self._occurrences[key],
            is_asked=is_asked,
            is_keepable=is_asked,
            reason="weight_cast" if is_cast else facts.replay_reason or "",
            is_random=facts.is_random,
            runs_once=facts.runs_once,
            sequence=next_sequence() - 1,
            inputs=tuple(sorted({self._producers[storage] for storage in read if storage in self._producers})),
        )
        self._occurrences[key] += 1
        if facts.writes or facts.writes_anything:
            self._remember_written(facts, args, kwargs)
        return seen

    def _remember_written(self, facts: Any, args: Any, kwargs: Any) -> None:
        written = [
            kwargs.get(at) if isinstance(at, str) else (args[at] if at < len(args) else None) for at in facts.writes
        ]
        for tensor in plain_tensors([*args, *kwargs.values()] if facts.writes_anything else written):
            producer = self._producers.get(tensor.untyped_storage()._cdata, BLOCK_INPUT)
            if producer != BLOCK_INPUT:
                self._changed.add(producer)

    def _module(self) -> str:
        stack = self._paths.stack
        path = stack[-1] if stack else self.seen.block
        return path.removeprefix(self.seen.block).removeprefix(".")

    def _end(self, seen: ObservedOp, facts: Any, output: Any) -> None:
        index = len(self.seen.ops)
        self.seen.ops.append(seen)
        shared: int | None = None
        for tensor in plain_tensors(output):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._read:
                shared = self._producers.get(key, shared)
                continue
            self._producers[key] = index
            self._watches.append(storage_watch(storage))
            if (index, key) not in self._sizes:
                self._sizes[index, key] = storage.nbytes()
                seen.output_bytes += storage.nbytes()
        if not seen.output_bytes:
            seen.alias = shared

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            producer = self._producers.get(storage._cdata)
            if producer is not None:
                self._count_kept(producer, storage, tensor)
        return alias(tensor)

    def _count_kept(self, producer: int, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        """The node that saves was just numbered. It belongs to the op that ran last if that made this value, else to the next."""
        last = len(self.seen.ops) - 1
        node: Any = tensor.grad_fn  # torch.autograd.graph.Node | None
        is_output = producer == last and (node is None or node._sequence_nr() == next_sequence() - 1)
        reader = max(last if is_output else last + 1, 0)
        if producer == BLOCK_INPUT:
            self.seen.input_kept_by.add(reader)
            return
        op = self.seen.ops[producer]
        # The means of a norm are held by the norm itself; that must not tie its output, which another op holds, to it.
        if storage.nbytes() * SIDE_OUTPUT >= op.output_bytes:
            op.kept_by.add(reader)
        op.kept_bytes += self._sizes.pop((producer, storage._cdata), 0)


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
