"""The dispatch modes of a region with a policy, on torch; see ``core.activation_checkpoint.region`` for the rules.

A pair of dispatch modes behind torch's own non-reentrant checkpoint. Both are called for every op, so they are written for
speed. What torch alone has:

* *Random ops* (rule 2). A random op that the replay skips leaves the random stream behind; every later random op that *is*
  replayed gets the state it had in forward, and the stream is put back when the replay ends. An op that is not torch's own
  may draw without saying so, and counts as random.
* *Which backward an op belongs to* (rule 6). A mode counts what belongs to the backward, or to none, in which it was entered.
* *What cannot be run again* (rule 4): a collective, and an op that draws from a generator of the caller's.
* *Collectives.* The output of a functional collective is kept where the policy says recompute: other ranks would have to take
  part in a replay. It is filled later, so its bytes are looked at after ``wait_tensor``; one that leaves is waited for first.
* *Inference mode.* What is made there cannot be saved for backward and has no version: it is always replayed.
* *Weight casts.* Autocast caches them, so that forward and replay may run a different number (``ops.is_weight_cast``).
* *Compilers.* Code compiled inside a region stays compiled; the modes tell the compiler to pass over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.ops import KNOWN, OpFacts, facts_of, is_weight_cast, move_versions, wait_for
from hyper_parallel.backends.torch.random_state import RandomState
from hyper_parallel.backends.torch.saved_tensors import TorchPacker
from hyper_parallel.backends.torch.storages import bytes_of, tensors_in
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.backends.torch.unseen_writes import NOTHING_TO_LEARN, KnownWrites, OutputWatch
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.packed import Packed
from hyper_parallel.core.activation_checkpoint.policy import as_op_policy, op_label
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.region import (
    REPLAYED,
    Filed,
    Region,
    RegionForward,
    RegionReplay,
    Replayed,
)
from hyper_parallel.errors import InPlaceChangeError, SwapImpossibleError
from hyper_parallel.fates import Fate
from hyper_parallel.platform.torch import compat

__all__ = ["ForwardMode", "ReplayMode", "create_selective_checkpoint_contexts"]

CHANGED_UNSEEN: Final = "changed_unseen"
_RECOMPUTE = Fate.RECOMPUTE
_current_task = torch._C._current_graph_task_id  # -1: no backward runs on this thread


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


class ForwardMode(RegionForward, _RegionMode):
    """Runs each op and files what becomes of its output."""

    def __init__(self, region: Region, known: KnownWrites) -> None:
        RegionForward.__init__(self, region)
        _RegionMode.__init__(self)
        if region.allows_mutation:
            self._watch = OutputWatch(NOTHING_TO_LEARN, is_always_on=False)
        else:
            self._watch = OutputWatch(known, is_always_on=region.packer.config.verify)
        self._has_skipped_random = False
        self._kept_unasked: set[tuple[Hashable, int]] = set()  # collectives for which the policy said recompute
        self._task = -1

    def __enter__(self) -> ForwardMode:
        self._begin_forward()
        self._task = _current_task()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        replayed: Counter[str] = Counter()
        if exc[0] is None:
            for key, number in self._watch.end():
                self._run_again(key, number)
                replayed[CHANGED_UNSEEN] += 1
        if self._watch.num_known:
            replayed[CHANGED_UNSEEN] += self._watch.num_known
        for key, entries in self._entries.items():
            reason = KNOWN[key].replay_reason  # type: ignore[index]  # the key is the op's id
            if reason is not None:
                replayed[reason] += len(entries)
        self._end_forward(replayed)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        key = id(op)  # the table of known ops keeps the op alive
        facts = KNOWN.get(key) or facts_of(op)
        if kwargs is None:
            kwargs = {}
        if facts.is_ignored or (facts.may_be_weight_cast and is_weight_cast(args)):
            return facts.run(*args, **kwargs)
        if (facts.writes or facts.writes_anything) and not self._region.allows_mutation:
            self._protect(facts, args, kwargs)
        if facts.writes_lists:
            move_versions(facts, args, kwargs)
        if _current_task() != self._task:  # rule 6
            return facts.run(*args, **kwargs)
        entries = self._entries.get(key)
        if entries is None:
            entries = self._entries[key] = []
        if facts.replay_reason is not None or torch.is_inference_mode_enabled():
            self._watch.may_keep(key, len(entries), is_kept=False)
            entries.append(self._replayed_entry(facts, args, kwargs) if facts.may_draw else REPLAYED)
            output = facts.run(*args, **kwargs)
            if facts.is_wait:
                self._watch.add_finished(output)
            return output
        fate = self._fate_of(key, op, args, kwargs)
        number = len(entries)
        if facts.runs_once and fate is _RECOMPUTE:
            fate = Fate.SAVE
            self._kept_unasked.add((key, number))
        if not self._watch.may_keep(key, number, is_kept=fate is not _RECOMPUTE):
            entries.append(self._replayed_entry(facts, args, kwargs) if facts.may_draw else REPLAYED)
            output = facts.run(*args, **kwargs)
            self._recomputed_bytes += bytes_of(output)
            return output
        entries.append(REPLAYED)  # what an exception inside the op leaves behind
        state = RandomState.now(args, kwargs, is_opaque=not facts.is_random) if facts.may_draw else None
        output = facts.run(*args, **kwargs)
        self._has_skipped_random |= facts.may_draw
        if facts.runs_once and fate is Fate.SWAP:
            wait_for(output)
        entries[-1] = filed = self._file(op, fate, output, args, state)
        self._watch.add(key, number, filed, output, is_finished=not facts.runs_once or fate is Fate.SWAP)
        return output

    def _run_again(self, key: Hashable, number: int) -> None:
        """A kernel that the dispatcher does not see has changed a filed output: the replay makes it again."""
        entry = self._entries[key][number]
        assert isinstance(entry, Filed), "only what was filed is watched"
        facts = KNOWN[key]  # type: ignore[index]  # the key is the op's id
        if not facts.can_run_again and (key, number) not in self._kept_unasked:
            raise InPlaceChangeError(
                f"{self._region.where}: cannot keep the output of {op_label(facts.op)} number {number + 1}, because a kernel "
                "that torch does not see (Triton, numpy, an extension) changes it in place, and cannot run the op again, "
                "because other ranks take part in it. Give that kernel a copy of its argument."
            )
        self._entries[key][number] = Replayed(entry.draw_state)

    def _replayed_entry(self, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> Replayed:
        """Rule 2: a state is kept only once the replay would be out of step."""
        if self._has_skipped_random:
            return Replayed(RandomState.now(args, kwargs, is_opaque=not facts.is_random))
        return REPLAYED

    def _swap_output(self, op: Any, tensor: torch.Tensor) -> Packed:
        if tensor.layout is not torch.strided:
            raise SwapImpossibleError(
                f"{self._region.where}: cannot swap the output of {op_label(op)}, a {tensor.layout} tensor, because it has no "
                "storage of its own. Let the policy answer MUST_SAVE or MUST_RECOMPUTE for it."
            )
        return super()._swap_output(op, tensor)

    def _before_change(self, filed: Filed) -> None:
        self._watch.before_change(filed)

    def _protect(self, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._region.filed_by_storage:
            return
        if facts.writes_anything:
            written: list[Any] = [*args, *kwargs.values()]
        else:
            written = [
                kwargs.get(at) if isinstance(at, str) else (args[at] if at < len(args) else None) for at in facts.writes
            ]
        self._protect_written(tensors_in(written))


class ReplayMode(RegionReplay, _RegionMode):
    """Runs what was not filed, hands out what was."""

    def __init__(self, region: Region) -> None:
        RegionReplay.__init__(self, region)
        _RegionMode.__init__(self)

    def __enter__(self) -> ReplayMode:
        self._begin_replay(_current_task())
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._end_replay()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replay one op."""
        key = id(op)
        facts = KNOWN.get(key) or facts_of(op)
        if kwargs is None:
            kwargs = {}
        if facts.is_ignored or (facts.may_be_weight_cast and is_weight_cast(args)):
            return facts.run(*args, **kwargs)
        runs = self._here.runs
        if not runs or runs[-1].task != _current_task():  # rule 6
            return facts.run(*args, **kwargs)
        run = runs[-1]
        cursor = run.cursors.get(key)
        entry = None if cursor is None else next(cursor, None)
        if entry is REPLAYED:
            return facts.run(*args, **kwargs)
        if entry is None:
            entry = self._entry_past_the_end(key, op, args)
        if isinstance(entry, Replayed):
            if entry.draw_state is not None:
                entry.draw_state.restore(run.displaced)
            return facts.run(*args, **kwargs)
        return self._output_of(run, entry, key, op, facts.run, args, kwargs)

    def _can_run_again(self, op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        has_generator = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
        return facts_of(op).can_run_again and not has_generator


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any,
    allow_cache_entry_mutation: bool = False,
    *,
    swap_config: SwapConfig | None = None,
    where: str = "checkpoint",
    position: Position | None = None,
    known: KnownWrites | None = None,
) -> tuple[ForwardMode, ReplayMode]:
    """The pair of contexts of one region, for ``torch.utils.checkpoint.checkpoint(context_fn=...)``.

    ``known``: what is known of this region from earlier calls; None: nothing, so that its kept outputs are looked at in every
    call. With ``allow_cache_entry_mutation`` a saved value that was changed in place is used as it is.
    """
    policy = as_op_policy(policy_fn_or_list, where=where, check_names=TENSORS.check_op_names)
    position = Position(TENSORS.next_sequence()) if position is None else position
    packer = TorchPacker(config=swap_config, where=where, position=position)
    region = Region(policy, packer, allows_mutation=allow_cache_entry_mutation)
    return ForwardMode(region, known or KnownWrites()), ReplayMode(region)
