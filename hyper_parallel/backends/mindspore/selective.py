"""The dispatch modes of a region with a policy, on MindSpore; see ``core.activation_checkpoint.region`` for the rules.

A pair of dispatch modes behind MindSpore's own non-reentrant recompute. What MindSpore alone has:

* *Random ops* (rule 2). An op that draws random numbers is never replayed: where the policy would recompute it, its output is
  kept and the policy counts as overruled. One that draws in place can be neither kept nor replayed, and is refused. With
  ``preserve_rng_state=False`` an op that draws is like any other: where it is recomputed, it draws other numbers. What is
  drawn in Python is put back by :class:`Drawing`.
* *No op schema.* Whether an op is a view or a factory is seen after it ran (``ops.replay_reason``).
* *No counter for some changes* (rule 4): a change outside the region shows only if MindSpore counts it. An op that draws
  cannot be run again, and raises.
* *Gradients inside a region* (rule 6). While a replay runs, forward files nothing. An op that draws is refused there.
* *Changed parameters.* A parameter of the region's cells that was changed after forward shows in its version or its address,
  if MindSpore moves one of them. The first op of the replay that reads it raises (``region_state``).
* *Lost gradients.* What ``mint.empty`` returns loses its gradient where a dispatch mode looks on, and is refused.
* *Waiting for ever.* See :meth:`ReplayMode._would_wait`.
* *Second order* is refused (``graph``).
"""

from __future__ import annotations

import contextlib
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.draws import Drawing
from hyper_parallel.backends.mindspore.graph import refuse_second_order
from hyper_parallel.backends.mindspore.ops import OpFacts, facts_of, inputs_of, replay_reason, tensors_in
from hyper_parallel.backends.mindspore.region_state import RegionState
from hyper_parallel.backends.mindspore.saved_tensors import MindSporePacker
from hyper_parallel.backends.mindspore.storages import alias, is_seen, storage_key
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.contexts import Replay
from hyper_parallel.core.activation_checkpoint.policy import as_op_policy
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.region import (
    REPLAYED,
    Region,
    RegionForward,
    RegionReplay,
    Replayed,
)
from hyper_parallel.core.activation_checkpoint.region_state import changed_in_place
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import ActivationError
from hyper_parallel.fates import Fate
from hyper_parallel.platform.mindspore import compat

__all__ = ["ForwardMode", "ReplayMode", "create_selective_checkpoint_contexts"]


class MindSporeRegion(Region):
    """A region with what its two modes share on MindSpore."""

    def __init__(
        self,
        policy: Any,
        packer: MindSporePacker,
        *,
        allows_mutation: bool,
        preserves_draws: bool,
        state: RegionState | None,
    ) -> None:
        super().__init__(policy, packer, allows_mutation=allows_mutation)
        self.state = state  # is told of writes in forward, and knows what was changed since then
        self.preserves_draws = preserves_draws
        self.drawing: Any = Drawing() if preserves_draws else contextlib.nullcontext()
        self.is_replaying = False


class ForwardMode(RegionForward, mindspore.MsDispatchMode):  # type: ignore[misc]
    """Runs each op and files what becomes of its output."""

    _region: MindSporeRegion

    def __init__(self, region: MindSporeRegion) -> None:
        RegionForward.__init__(self, region)
        self._replayed: dict[str, int] = {}
        self._overruled = 0
        self._written: dict[int, Any] = {}  # address -> an alias that holds it

    def __enter__(self) -> ForwardMode:
        self._begin_forward()
        self._region.drawing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        leaves = super().__exit__(*exc)
        self._written = {}
        self._region.drawing.__exit__(*exc)
        self._end_forward(self._replayed)
        SwapManager().counters.add_to("overruled", "random_op_kept", self._overruled)
        return leaves

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Run one op."""
        facts = facts_of(func.name)
        if self._written and is_seen():
            self._refuse_lost_gradient(args)
        if facts.is_ignored or self._region.is_replaying or not is_seen():
            return func(*args)
        if facts.writes_first:
            self._before_write(func, facts, args)
        entries = self._entries.setdefault(func.name, [])
        entries.append(REPLAYED)  # what an exception inside the op leaves behind
        output = func(*args)
        if facts.writes_first and compat.is_recording():
            self._remember_written(args)
        reason = replay_reason(facts, args, output)
        if reason is not None and not (facts.is_random and reason == "factory"):
            self._replayed[reason] = self._replayed.get(reason, 0) + 1
            return output
        fate = self._fate_of(func.name, func, inputs_of(args), {})
        if fate is Fate.RECOMPUTE and facts.is_random and self._region.preserves_draws:
            self._overruled += 1
            fate = Fate.SAVE
        if fate is Fate.RECOMPUTE:
            self._recomputed_bytes += TENSORS.bytes_of(output)
        else:
            entries[-1] = self._file(func, fate, output, args)
        return output

    def _before_write(self, func: Any, facts: OpFacts, args: Any) -> None:
        region = self._region
        if facts.is_random and region.preserves_draws:
            raise ActivationError(
                f"{region.where}: cannot recompute {func.name}; because it draws random numbers into a tensor in "
                "place, which can be neither kept nor drawn again; use its out-of-place form, or keep it outside the region"
            )
        for tensor in tensors_in(args)[:1]:
            if region.state is not None:
                region.state.before_write(tensor)
            if not region.allows_mutation:
                self._protect_written((tensor,))

    def _remember_written(self, args: Any) -> None:
        """A tensor without autograd history that takes values with one must have a history when it is next seen."""
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


class ReplayMode(RegionReplay, mindspore.MsDispatchMode):  # type: ignore[misc]
    """Runs what was not filed, hands out what was."""

    _region: MindSporeRegion

    def __init__(self, region: MindSporeRegion) -> None:
        RegionReplay.__init__(self, region)
        self._changed: dict[int, str] = {}  # address of what was changed after forward -> what it is
        self._made: dict[int, Any] = {}  # address of what a factory returned -> None, or an alias: see _remember_made
        self._draws = False
        self._drawing: Any = Replay(region.drawing) if region.preserves_draws else contextlib.nullcontext()

    def __enter__(self) -> ReplayMode:
        self._made = {}
        self._draws = any(facts_of(str(name)).is_random for name in self._region.entries)
        self._changed = {} if self._region.state is None else self._region.state.changed()
        self._drawing.__enter__()
        self._region.is_replaying = True
        self._begin_replay()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> Any:
        leaves = super().__exit__(*exc)
        self._region.is_replaying = False
        self._made = {}
        self._end_replay()
        self._drawing.__exit__(*exc)
        return leaves

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Replay one op."""
        facts = facts_of(func.name)
        if facts.is_ignored or not is_seen():
            return func(*args)
        if self._changed:
            self._refuse_changed(func, args)
        run = self._here.runs[-1]
        entry = next(run.cursors.get(func.name, iter(())), None)
        if entry is None:
            self._entry_past_the_end(func.name, func, args)
            return self._run_ahead(func, facts, args)
        if isinstance(entry, Replayed):
            output = func(*args)
            self._remember_made(func, args, output)
            return output
        if self._made and self._would_wait(func, facts, args):
            return func(*args)
        refuse_second_order(self._region.where)
        output = self._output_of(run, entry, func.name, func, func, args, {})
        self._forget_reused(args, output)
        return output

    def _can_run_again(self, op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return not facts_of(op.name).is_random

    def _refuse_changed(self, func: Any, args: Any) -> None:
        for tensor in tensors_in(args):
            label = self._changed.get(storage_key(tensor))
            if label is not None:
                raise changed_in_place(self._region.where, label, func.name)

    def _remember_made(self, func: Any, args: Any, output: Any) -> None:
        """Remember what a factory made, what comes of that alone, and what item assignment put in its place.

        An address names it until another output lies there. To hold the bytes as well would cost their memory to the end of
        the replay; only a region that draws pays that, because an op that draws is refused where its input has a name in error,
        while every other op is then only run again.
        """
        read = tensors_in(args)
        is_made = not read
        if read and self._has_made(read):
            is_assignment = func.name.startswith(("TensorScatter", "Select"))
            is_made = is_assignment or not any(tensor._requires_grad for tensor in read)
        if is_made:
            self._made.update(
                (storage_key(tensor), alias(tensor) if self._draws else None) for tensor in tensors_in((output,))
            )
        else:
            self._forget_reused(args, output)

    def _forget_reused(self, args: Any, output: Any) -> None:
        """An op's output that lies where something was made: that is gone."""
        if self._made:
            read = {storage_key(tensor) for tensor in tensors_in(args)}
            for tensor in tensors_in((output,)):
                if (key := storage_key(tensor)) not in read:
                    self._made.pop(key, None)

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
    policy = as_op_policy(policy_fn_or_list, where=where, check_names=TENSORS.check_op_names)
    position = Position(TENSORS.next_sequence()) if position is None else position
    region = MindSporeRegion(
        policy,
        MindSporePacker(config=swap_config, where=where, position=position),
        allows_mutation=allow_cache_entry_mutation,
        preserves_draws=preserves_draws,
        state=state,
    )
    return ForwardMode(region), ReplayMode(region)
