"""``profile_memory`` on MindSpore: a few trial steps, and what they were made of.

The trials are those of torch (see ``backends/torch/planner/profiling.py``), without those of the host: a simulated device is the
host. What differs: a step of MindSpore makes its gradients anew and returns them, so that they belong to the step. Each block,
and what is around the blocks, says how many bytes of weight gradients its backward leaves behind.

The simulated device counts what ops make. Weights, batches and optimizer states are made by no op: they count on Ascend only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import platform
from collections.abc import Callable, Sequence
from typing import Any, Final

import mindspore

from hyper_parallel._version import __version__
from hyper_parallel.backends.mindspore.planner.blocks import TREE, device_of, require_cell
from hyper_parallel.backends.mindspore.planner.meters import memory_of, meter_for
from hyper_parallel.backends.mindspore.planner.survey import find_blocks_of_step, surveyed
from hyper_parallel.backends.mindspore.planner.trial_guard import restored_after
from hyper_parallel.backends.mindspore.planner.trial_steps import trial_step
from hyper_parallel.backends.planning.blocks import fingerprint_of
from hyper_parallel.backends.planning.engine_settings import engine_settings, far_caps
from hyper_parallel.backends.planning.kinds import group_by_kind, make_kind, shared_storages
from hyper_parallel.backends.planning.links import link_of_spans
from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.backends.planning.segments import (
    backward_seconds,
    call_of,
    epilogue,
    forward_seconds,
    kept_bytes,
    made_before_blocks,
    median,
    prologue,
)
from hyper_parallel.backends.planning.survey import Survey, require_step
from hyper_parallel.backends.planning.trials import ALONE, OBSERVED, REPLAYED, REPLAYED_SWAPPED, TrialStep
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.profile import BaseBytes, Block, BlockKind, Cut, CutRegion, Measured, Profile, Segment
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.records.versions import Versions

__all__ = ["profile_memory"]

_FITS_SHARE: Final = 0.9  # of the device: an estimate above this is not tried
Step = Callable[[], Any]


def profile_memory(
    model: Any,
    step: Step,
    *,
    blocks: str | Sequence[str] | None = None,
    steps: int = 3,
    is_guarded: bool = False,
    agrees: Callable[[bool], bool] = bool,
) -> Profile:
    """See ``hyper_parallel.profile_memory``. The last two are those of torch's."""
    who = "profile_memory"
    require_cell(model, who)
    require_step(step, who)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{who}: steps says how many steps are timed, 1 or more; got {steps!r}")
    found = find_blocks_of_step(model, blocks, step, who=who)
    meter = meter_for(device_of(model, who), who=who)
    with contextlib.nullcontext() if is_guarded else restored_after(model, who=who):
        return _Profiler(model, step, found, meter, steps=steps, agrees=agrees).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trials:
    """The results of all trial steps of one profile."""

    survey: Survey
    kinds: Sequence[int]  # of each call
    stand_ins: Sequence[int]  # of each kind, the call that was observed
    base_bytes: int
    memory: TrialStep
    timings: Sequence[TrialStep]
    plain: Sequence[TrialStep]  # none where the step left alone does not fit
    weighed: TrialStep | None


class _Profiler:
    """The trials of one profile, one after the other."""

    def __init__(
        self,
        model: Any,
        step: Step,
        blocks: list[BlockRef],
        meter: Meter,
        *,
        steps: int,
        agrees: Callable[[bool], bool],
    ) -> None:
        self.model = model
        self.step = step
        self.blocks = blocks
        self.meter = meter
        self.steps = steps
        self.agrees = agrees
        self.spans: list[LinkSpan] = []

    def run(self) -> Profile:
        """All trials, then the record."""
        survey = self._survey()
        kinds, stand_ins = group_by_kind(TREE, survey.calls, self.blocks)
        observed = {survey.calls[at].block for at in stand_ins}
        gc.collect()
        self.meter.wait()
        base_bytes = self.meter.active_bytes()
        memory = self._trial(observed, rest=REPLAYED, reads_memory=True)
        timings = [self._timed(observed) for _ in range(self.steps)]
        kept = sum(kept_bytes(memory, survey.calls[stand_ins[kind]].block) for kind in kinds)
        plain, weighed = self._plain(memory, kept)
        return self._record(
            _Trials(
                survey=survey,
                kinds=kinds,
                stand_ins=stand_ins,
                base_bytes=base_bytes,
                memory=memory,
                timings=timings,
                plain=plain,
                weighed=weighed,
            )
        )

    # ------------------------------------------------------------------ trials

    def _survey(self) -> Survey:
        try:
            with surveyed(self.model, self.blocks) as survey:
                self.step()
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
            compat.end_failed_gradient()
            self.meter.release_cached()
            raise BudgetTooSmallError(
                f"profile_memory: the step does not fit on {self.meter.device_name} even with every block replayed and its "
                f"inputs swapped ({error}). Shorten the sequence or the batch, or shard the model."
            ) from None
        survey.check("profile_memory", self.blocks)
        return survey

    def _trial(self, observed: set[str], *, rest: str, reads_memory: bool) -> TrialStep:
        how = {block.name: OBSERVED if block.name in observed else rest for block in self.blocks}
        with trial_step(self.model, self.blocks, how, self.meter, reads_memory=reads_memory) as result:
            self.step()
        return result

    def _timed(self, observed: set[str]) -> TrialStep:
        with SwapManager().record_timeline() as spans:
            result = self._trial(observed, rest=REPLAYED_SWAPPED, reads_memory=False)
        self.spans.extend(spans)
        return result

    def _plain(self, memory: TrialStep, kept: int) -> tuple[list[TrialStep], TrialStep | None]:
        """The step left alone, timed and weighed; nothing where it does not fit."""
        capacity = self.meter.capacity_bytes()
        peak = max(point.peak_bytes for point in memory.points)
        if not self.agrees(capacity is None or peak + kept <= _FITS_SHARE * capacity):
            return [], None
        try:
            weighed = self._trial(set(), rest=ALONE, reads_memory=True)
            return [self._trial(set(), rest=ALONE, reads_memory=False) for _ in range(self.steps)], weighed
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
            compat.end_failed_gradient()
        self.meter.release_cached()
        return [], None

    # ------------------------------------------------------------------ the record

    def _record(self, trials: _Trials) -> Profile:
        config = current_config()
        rows = _rows(trials)
        timed = trials.plain or trials.timings
        before, after = self._gradient_bytes_around(trials)
        return Profile(
            versions=Versions(
                framework="mindspore",
                framework_version=mindspore.__version__,
                device=self.meter.device_name,
                library_version=__version__,
                python_version=platform.python_version(),
            ),
            model_fingerprint=fingerprint_of(TREE, self.model),
            base=self._base(trials.base_bytes),
            kinds=tuple(self._kind(trials, kind) for kind in range(len(trials.stand_ins))),
            blocks=rows,
            prologue=_with_gradients(prologue(trials.memory, timed, rows[0].input_bytes), before),
            epilogue=_with_gradients(epilogue(trials.memory, timed), after),
            measured=self._measured(trials.plain, trials.weighed),
            link=link_of_spans(self.spans),
            far=far_caps(config),
            engine=engine_settings(config),
            inputs=trials.survey.inputs,
            device_memory=memory_of(self.model, self.meter),
        )

    def _base(self, base_bytes: int) -> BaseBytes:
        """What is there between two steps, and counted."""
        weights = 0 if self.meter.is_simulated else sum(p.nbytes for p in TREE.parameters(self.model))
        weights = min(weights, base_bytes)
        return BaseBytes(weights=weights, gradients=0, optimizer=0, other=base_bytes - weights)

    def _kind(self, trials: _Trials, kind: int) -> BlockKind:
        name = trials.survey.calls[trials.stand_ins[kind]].block
        cell = next(block.module for block in self.blocks if block.name == name)
        members = [number for number, of in enumerate(trials.kinds) if of == kind]
        made = make_kind(
            type(cell).__name__,
            call_of(trials.memory, name),
            [(one, call_of(one, name)) for one in trials.timings],
            forward_seconds=median([forward_seconds(one, number) for one in trials.plain for number in members]),
            backward_seconds=median([backward_seconds(one, number) for one in trials.plain for number in members]),
            runs_from_tape=False,
            host_seconds=(0.0, 0.0),
        )
        gradients = _trained_bytes(cell)
        ops = tuple(dataclasses.replace(op, backward_bytes=max(0, op.backward_bytes - gradients)) for op in made.ops)
        return dataclasses.replace(
            made,
            ops=ops,
            cuts=tuple(Cut(regions=tuple(map(_replayed_to_its_end, cut.regions))) for cut in made.cuts),
            gradient_bytes=gradients,
            backward_transient_bytes=max(0, made.backward_transient_bytes - gradients),
        )

    def _gradient_bytes_around(self, trials: _Trials) -> tuple[int, int]:
        """Bytes of weight gradients of what is before the blocks, and of what is after them.

        What is after them has its gradients when the backward of the last block begins.
        """
        outside = _trained_bytes(self.model) - sum(_trained_bytes(block.module) for block in self.blocks)
        begins = [call.backward_begin for call in trials.memory.calls if call.backward_begin is not None]
        ends = [point for point in trials.memory.points if point.name == "model forward ends"]
        if not begins or not ends:
            return 0, outside
        first = min(begins, key=lambda point: point.host_seconds)
        return (outside - self._after(trials, first.active_bytes), self._after(trials, first.active_bytes))

    def _after(self, trials: _Trials, active_bytes: int) -> int:
        """Of the parameters outside all blocks, in order from the last: those whose gradients fit in what was there."""
        inside = {id(parameter) for block in self.blocks for parameter in TREE.parameters(block.module)}
        outside = [one for one in TREE.parameters(self.model) if id(one) not in inside and one.requires_grad]
        last = trials.memory.calls[-1]
        assert last.forward_end is not None, "every call ended"
        made = active_bytes - last.forward_end.active_bytes
        found = 0
        for parameter in reversed(outside):
            if found + parameter.nbytes > made:
                break
            found += int(parameter.nbytes)
        return found

    def _measured(self, plain: Sequence[TrialStep], weighed: TrialStep | None) -> Measured:
        under = "none"
        if not plain or weighed is None:
            under = "every block replayed"
            weighed = self._trial(set(), rest=REPLAYED, reads_memory=True)
            plain = [self._trial(set(), rest=REPLAYED, reads_memory=False)]
        highest = max(weighed.points, key=lambda point: point.peak_bytes)
        before = weighed.points[max(0, weighed.points.index(highest) - 1)]
        seconds = median([one.seconds(one.points[0], one.points[-1]) for one in plain])
        assert seconds is not None, "at least one step was timed"
        return Measured(
            step_seconds=seconds,
            peak_bytes=highest.peak_bytes,
            peak_where=f"after {before.name}",
            reserved_bytes=max(0, self.meter.reserved_bytes()),
            under=under,
        )


def _trained_bytes(cell: Any) -> int:
    return sum(int(parameter.nbytes) for parameter in TREE.parameters(cell) if parameter.requires_grad)


def _replayed_to_its_end(region: CutRegion) -> CutRegion:
    """A replay of MindSpore does not stop early (see ``framework_checkpoint``)."""
    return dataclasses.replace(region, replay_stop=region.stop_op)


def _with_gradients(segment: Segment, gradients: int) -> Segment:
    """The segment's peaks were measured with its gradients in them."""
    transient = max(0, segment.backward_transient_bytes - gradients)
    return dataclasses.replace(segment, gradient_bytes=gradients, backward_transient_bytes=transient)


def _rows(trials: _Trials) -> tuple[Block, ...]:
    calls = trials.survey.calls
    shared = shared_storages(calls)
    given = [sum(n for key, n in call.input_storages.items() if key not in shared) for call in calls]
    given[0] = min(given[0], made_before_blocks(trials.memory))  # a batch that was there before belongs to the base
    return tuple(
        Block(name=call.block, kind=kind, input_bytes=nbytes) for call, kind, nbytes in zip(calls, trials.kinds, given)
    )
