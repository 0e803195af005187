"""``profile_memory``: a few trial steps, and what they were made of.

Order of trials
---------------
1. *Survey*: every block replayed, inputs swapped: which ops, which kinds. Gradients come into being here and stay for
   the other trials, as they are in a training run that accumulates: the larger of two cases.
2. *Bytes*: one block of every kind left alone and observed op by op, the others replayed.
3. *Host*: what it takes to issue each block as a region (see ``host_costs``). A simulated device is the host: not there.
4. *Seconds*, several times: as for bytes, with clocks; the others swap their inputs, so that the link is measured under load.
5. *Plain*: nothing changed, where that fits: the step's own peak and time, and then host and device apart.

Compiled blocks are observed uncompiled, and run compiled in all other trials. After the survey the graph that recomputes
everything is compiled. It and the blocks' own graph are run for their peaks and for what is saved (``graph_trials``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel._version import __version__
from hyper_parallel.backends.planning.engine_settings import engine_settings, far_caps
from hyper_parallel.backends.planning.kinds import group_by_kind, make_kind, shared_storages
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
from hyper_parallel.backends.torch.devices import backend_for
from hyper_parallel.backends.torch.planner.blocks import (
    TREE,
    BlockRef,
    device_of,
    fingerprint_of,
    require_module,
)
from hyper_parallel.backends.torch.planner.compiled import is_compiled
from hyper_parallel.backends.torch.planner.device_memory import memory_of, optimizers_of
from hyper_parallel.backends.torch.planner.graph_trials import GraphTrials, compiled_kind
from hyper_parallel.backends.torch.planner.host_costs import Issued, host_cost, issued
from hyper_parallel.backends.torch.planner.links import measure_link
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.backends.torch.planner.moment_peaks import moments_of_trial
from hyper_parallel.backends.torch.planner.op_observer import ObservedCall
from hyper_parallel.backends.torch.planner.survey import Survey, require_step, surveyed
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.backends.torch.planner.trial_steps import (
    ALONE,
    OBSERVED,
    REGION,
    REPLAYED,
    REPLAYED_SWAPPED,
    TrialStep,
    trial_step,
)
from hyper_parallel.backends.torch.tape import runs_from_tape
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.block_trace import replayed_ops
from hyper_parallel.planner.profile import BaseBytes, Block, BlockKind, HostCost, Measured, Profile
from hyper_parallel.planner.step_inputs import StepInputs
from hyper_parallel.platform.torch import compat
from hyper_parallel.records.versions import Versions

__all__ = ["profile_memory"]

_FITS_SHARE: Final = 0.9  # of the device: an estimate above this is not tried
_AHEAD: Final = 1.3  # the device is held for this many times what the host takes
_OBSERVED_OP_SECONDS: Final = 60e-6  # what watching an op takes beside
_ENOUGH_SECONDS: Final = (
    0.6  # of timed steps of one sort: long steps are timed less often, because noise is a smaller part of them
)
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
    """See ``hyper_parallel.profile_memory``.

    ``is_guarded``: the caller puts back what trial steps change. ``agrees``: whether what is so here is so on all ranks,
    for steps that only all of them can try.
    """
    who = "profile_memory"
    require_module(model, who)
    require_step(step, who)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{who}: steps says how many steps are timed, 1 or more; got {steps!r}")
    found = find_blocks_of_step(model, blocks, step, who=who)
    device = device_of(model, who)
    meter = meter_for(device, who=who)
    with contextlib.nullcontext() if is_guarded else restored_after(model, device, who=who):
        return _Profiler(model, step, found, device, meter, steps=steps, agrees=agrees).run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trials:
    """The results of all trial steps of one profile."""

    calls: Sequence[ObservedCall]  # of the survey, in order
    inputs: StepInputs | None  # of the survey
    kinds: Sequence[int]  # of each call
    stand_ins: Sequence[int]  # of each kind, the call that was observed
    base: BaseBytes
    memory: TrialStep
    timings: Sequence[TrialStep]
    plain: Sequence[TrialStep]  # none where the step left alone does not fit
    weighed: TrialStep | None
    region: TrialStep | None  # every block a region; the host's seconds. None: a simulated device
    alone: TrialStep | None  # every block left alone; the host's seconds. None: simulated, or does not fit
    busy: TrialStep | None  # the same, with the device's seconds
    graphs: GraphTrials | None  # None: no block is compiled


class _Profiler:
    """The trials of one profile, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        blocks: list[BlockRef],
        device: torch.device,
        meter: Meter,
        *,
        steps: int,
        agrees: Callable[[bool], bool],
    ) -> None:
        self.model = model
        self.step = step
        self.blocks = blocks
        self.device = device
        self.meter = meter
        self.steps = steps
        self.agrees = agrees
        self.spans: list[LinkSpan] = []
        self.memory = memory_of(model, meter)

    def run(self) -> Profile:
        """All trials, then the record."""
        survey = self._survey()
        kinds, stand_ins = group_by_kind(TREE, survey.calls, self.blocks)
        observed = {survey.calls[at].block for at in stand_ins}
        graphs = GraphTrials.run(self.blocks, observed, self._trial_of)
        base = self._base()
        memory = self._trial(observed, rest=REPLAYED, reads_memory=True)
        first = self._issued(REGION)  # proves the tapes
        region = None if self.meter.is_simulated else self._issued(REGION)
        if graphs is not None:
            graphs.timed = first if region is None else self._issued(REGION, _holds_of(region))
        holds = {} if region is None else _holds_of_observed(region, observed, memory)
        timings = self._enough(lambda: self._timed(observed, holds))
        kept = sum(kept_bytes(memory, survey.calls[stand_ins[kind]].block) for kind in kinds)
        plain, weighed = self._plain(memory, kept)
        alone = None if self.meter.is_simulated or not plain else self._issued(ALONE)
        busy = None if alone is None else self._issued(ALONE, _holds_of(alone))
        return self._record(
            _Trials(
                calls=survey.calls,
                inputs=survey.inputs,
                kinds=kinds,
                stand_ins=stand_ins,
                base=base,
                memory=memory,
                timings=timings,
                plain=plain,
                weighed=weighed,
                region=region,
                alone=alone,
                busy=busy,
                graphs=graphs,
            )
        )

    # ------------------------------------------------------------------ trials

    def _survey(self) -> Survey:
        try:
            with surveyed(self.model, self.blocks, who="profile_memory") as survey:
                self.step()
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
            error = error.with_traceback(None)
            self.meter.release_cached()
            raise BudgetTooSmallError(
                f"profile_memory: the step does not fit on {self.meter.device_name} even with every block replayed and its "
                f"inputs swapped ({error}). Shorten the sequence or the batch, or shard the model."
            ) from None
        survey.check("profile_memory", self.blocks)
        return survey

    def _base(self) -> BaseBytes:
        """What is there between two steps."""
        gc.collect()
        self.meter.wait()
        weights = _bytes_of(self.model.parameters())
        gradients = _bytes_of(p.grad for p in self.model.parameters() if p.grad is not None)
        optimizer = _bytes_of(_optimizer_states(self.model))
        rest = self.meter.active_bytes() - weights - gradients - optimizer
        if rest < 0:  # states, or weights, that are not on the device
            optimizer = max(0, optimizer + rest)
        return BaseBytes(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            other=max(0, self.meter.active_bytes() - weights - gradients - optimizer),
        )

    def _trial(
        self,
        observed: set[str],
        *,
        rest: str,
        reads_memory: bool,
        holds: Mapping[str, Issued] | None = None,
        is_idle_before_blocks: bool = False,
    ) -> TrialStep:
        how = {block.name: OBSERVED if block.name in observed else rest for block in self.blocks}
        return self._trial_of(how, reads_memory=reads_memory, holds=holds, is_idle_before_blocks=is_idle_before_blocks)

    def _trial_of(
        self,
        how: Mapping[str, str],
        *,
        reads_memory: bool,
        holds: Mapping[str, Issued] | None = None,
        is_idle_before_blocks: bool = False,
    ) -> TrialStep:
        with trial_step(
            self.model,
            self.blocks,
            how,
            self.meter,
            reads_memory=reads_memory,
            holds=holds,
            is_idle_before_blocks=is_idle_before_blocks,
        ) as result:
            self.step()
        return result

    def _timed(self, observed: set[str], holds: Mapping[str, Issued]) -> TrialStep:
        with SwapManager().record_timeline() as spans:
            result = self._trial(observed, rest=REPLAYED_SWAPPED, reads_memory=False, holds=holds)
        self.spans.extend(spans)
        return result

    def _enough(self, timed: Callable[[], TrialStep]) -> list[TrialStep]:
        """Timed steps: as many as asked for, or fewer that take long enough together."""
        found: list[TrialStep] = []
        seconds = 0.0
        while not found or (len(found) < self.steps and not self.agrees(seconds >= _ENOUGH_SECONDS)):
            found.append(timed())
            seconds += found[-1].seconds(found[-1].points[0], found[-1].points[-1])
        return found

    def _issued(self, rest: str, holds: Mapping[str, Issued] | None = None) -> TrialStep:
        """Every block treated alike, begun on an idle device; behind ``holds``, the host is ahead of it from there on."""
        return self._trial(set(), rest=rest, reads_memory=False, holds=holds, is_idle_before_blocks=True)

    def _plain(self, memory: TrialStep, kept: int) -> tuple[list[TrialStep], TrialStep | None]:
        """The step left alone, with its time and its peak; nothing where it does not fit."""
        capacity = self.meter.capacity_bytes()
        peak = max(point.peak_bytes for point in memory.points)
        if not self.agrees(capacity is None or peak + kept <= _FITS_SHARE * capacity):
            return [], None
        try:
            weighed = self._trial(set(), rest=ALONE, reads_memory=True)
            return self._enough(lambda: self._trial(set(), rest=ALONE, reads_memory=False)), weighed
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
        self.meter.release_cached()
        return [], None

    # ------------------------------------------------------------------ the record

    def _record(self, trials: _Trials) -> Profile:
        config = current_config()
        backend = backend_for(self.device, config)
        assert backend is not None, "a device that has a meter has a backend"
        rows = _rows(trials)
        host = self._host_cost(trials)
        kinds = tuple(self._kind(trials, kind, host) for kind in range(len(trials.stand_ins)))
        return Profile(
            versions=Versions(
                framework="torch",
                framework_version=torch.__version__,
                device=self.meter.device_name,
                library_version=__version__,
                python_version=platform.python_version(),
            ),
            model_fingerprint=fingerprint_of(self.model),
            base=trials.base,
            kinds=kinds,
            blocks=rows,
            prologue=prologue(trials.memory, trials.plain or trials.timings, rows[0].input_bytes),
            epilogue=epilogue(trials.memory, trials.plain or trials.timings),
            measured=self._measured(trials.plain, trials.weighed),
            link=measure_link(backend, self.meter, self.spans),
            far=far_caps(config),
            engine=engine_settings(config),
            inputs=trials.inputs,
            device_memory=self.memory,
            host=host,
        )

    def _host_cost(self, trials: _Trials) -> HostCost:
        """Nothing where the device is simulated: it is the host, and its time is counted already."""
        if trials.region is None:
            return HostCost()
        numbers = range(len(trials.calls))
        replayed = [replayed_ops(self._kind(trials, kind, HostCost())) for kind in range(len(trials.stand_ins))]
        return host_cost(
            self.device,
            self.meter,
            alone=[] if trials.alone is None else [issued(trials.alone, [number]) for number in numbers],
            region=[issued(trials.region, [number]) for number in numbers],
            ops=sum(len(call.ops) for call in trials.calls),
            replayed=sum(replayed[kind] for kind in trials.kinds),
        )

    def _kind(self, trials: _Trials, kind: int, host: HostCost) -> BlockKind:
        name = trials.calls[trials.stand_ins[kind]].block
        module = next(block.module for block in self.blocks if block.name == name)
        members = [number for number, of in enumerate(trials.kinds) if of == kind]
        timed = trials.plain if trials.busy is None else [trials.busy]
        forward = median([forward_seconds(one, number) for one in timed for number in members])
        backward = median([backward_seconds(one, number) for one in timed for number in members])
        graphs = trials.graphs if is_compiled(module) else None
        made = make_kind(
            type(compat.uncompiled(module)).__name__,
            call_of(trials.memory, name),
            [(one, call_of(one, name)) for one in trials.timings],
            forward_seconds=forward if graphs is None else None,
            backward_seconds=backward if graphs is None else None,
            runs_from_tape=graphs is not None or runs_from_tape(module),
            host_seconds=_host_seconds(trials, members, host),
        )
        made = dataclasses.replace(made, weight_bytes=_bytes_of(module.parameters()))
        return made if graphs is None else compiled_kind(made, graphs, name, members, forward, backward)

    def _measured(self, plain: Sequence[TrialStep], weighed: TrialStep | None) -> Measured:
        under = "none"
        if not plain or weighed is None:
            under = "every block replayed"
            weighed = self._trial(set(), rest=REPLAYED, reads_memory=True)
            plain = [self._trial(set(), rest=REPLAYED, reads_memory=False)]
        before, highest = max(zip(weighed.points, weighed.points[1:]), key=lambda pair: pair[1].peak_bytes)
        seconds = median([one.seconds(one.points[0], one.points[-1]) for one in plain])
        assert seconds is not None, "at least one step was timed"
        return Measured(
            step_seconds=seconds,
            peak_bytes=highest.peak_bytes,
            peak_where=f"after {before.name}",
            reserved_bytes=max(0, self.meter.reserved_bytes()),
            under=under,
            moments=moments_of_trial(weighed),
        )


def _rows(trials: _Trials) -> tuple[Block, ...]:
    shared = shared_storages(trials.calls)
    given = [sum(n for key, n in call.input_storages.items() if key not in shared) for call in trials.calls]
    given[0] = min(given[0], made_before_blocks(trials.memory))  # a batch that was there before belongs to the base
    return tuple(
        Block(name=call.block, kind=kind, input_bytes=nbytes)
        for call, kind, nbytes in zip(trials.calls, trials.kinds, given)
    )


def _bytes_of(tensors: Any) -> int:
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _optimizer_states(model: nn.Module) -> list[torch.Tensor]:
    """The states of every optimizer that holds one of the model's parameters."""
    mine = set(map(id, model.parameters()))
    found: list[torch.Tensor] = []
    for optimizer in optimizers_of(model):
        for parameter, state in optimizer.state.items():
            if id(parameter) in mine:
                found += [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    return found


def _host_seconds(trials: _Trials, members: Sequence[int], host: HostCost) -> Issued:
    """What the host takes for a block left alone; where that does not fit, for a region, less what a region costs."""
    if trials.alone is not None:
        return issued(trials.alone, members)
    if trials.region is None:
        return 0.0, 0.0
    forward, backward = issued(trials.region, members)
    return max(0.0, forward - host.region_seconds), max(0.0, backward - host.region_backward_seconds)


def _holds_of(trial: TrialStep) -> dict[str, Issued]:
    """Long enough for the host to issue each block."""
    seconds = {call.block: issued(trial, [number]) for number, call in enumerate(trial.calls)}
    return {name: (_AHEAD * forward, _AHEAD * backward) for name, (forward, backward) in seconds.items()}


def _holds_of_observed(region: TrialStep, observed: set[str], memory: TrialStep) -> dict[str, Issued]:
    """The same for blocks that are observed op by op."""
    watching = {call.block: _OBSERVED_OP_SECONDS * len(call.seen.ops) for call in memory.calls if call.seen is not None}
    return {
        name: (forward + watching[name], backward + watching[name])
        for name, (forward, backward) in _holds_of(region).items()
        if name in observed and name in watching
    }
