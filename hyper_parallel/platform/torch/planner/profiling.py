"""``profile_memory``: a few trial steps, and what they were made of.

Order of trials
---------------
1. *Survey*: every block replayed, inputs swapped: which ops, which kinds. Gradients come into being here and stay for
   the other trials, as they are in a training run that accumulates: the larger of two cases.
2. *Bytes*: one block of every kind left alone and seen op by op, the others replayed.
3. *Seconds*, several times: the same with clocks; the others swap their inputs, so that the link is measured under load.
4. *Plain*: nothing changed, where that fits: the step's own peak and time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel._version import __version__
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.activation_checkpoint.timing import Span
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.profile import BaseBytes, Block, HostCost, Measured, Profile, Segment, Versions
from hyper_parallel.platform.torch.activation_checkpoint.devices import backend_for
from hyper_parallel.platform.torch.planner.blocks import (
    BlockRef,
    device_of,
    find_blocks,
    fingerprint_of,
    require_module,
)
from hyper_parallel.platform.torch.planner.kinds import fold, make_kind, shared_storages
from hyper_parallel.platform.torch.planner.links import engine_settings, far_caps, measure_link
from hyper_parallel.platform.torch.planner.meters import Meter, meter_for
from hyper_parallel.platform.torch.planner.survey import Survey, require_step, surveyed
from hyper_parallel.platform.torch.planner.trial import no_trace
from hyper_parallel.platform.torch.planner.trials import (
    ALONE,
    OBSERVED,
    REGION,
    REPLAYED,
    REPLAYED_SWAPPED,
    Call,
    Point,
    Trial,
    trial,
)

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
) -> Profile:
    """See ``hyper_parallel.profile_memory``; ``is_guarded``: the caller puts back what trial steps change."""
    who = "profile_memory"
    require_module(model, who)
    require_step(step, who)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{who}: steps says how many steps are timed, 1 or more; got {steps!r}")
    found = find_blocks(model, blocks, who=who)
    device = device_of(model, who)
    meter = meter_for(device, who=who)
    with contextlib.nullcontext() if is_guarded else no_trace(model, device, who=who):
        return _Profiler(model, step, found, device, meter, steps).run()


class _Profiler:
    """The trials of one profile, one after the other."""

    def __init__(
        self, model: nn.Module, step: Step, blocks: list[BlockRef], device: torch.device, meter: Meter, steps: int
    ) -> None:
        self.model = model
        self.step = step
        self.blocks = blocks
        self.device = device
        self.meter = meter
        self.steps = steps
        self.spans: list[Span] = []

    def run(self) -> Profile:
        """All trials, then the record."""
        survey = self._survey()
        kinds, stand_ins = fold(survey.calls, self.blocks)
        observed = {survey.calls[at].block for at in stand_ins}
        base = self._base()
        memory = self._trial(observed, rest=REPLAYED, reads_memory=True)
        timings = [self._timed(observed) for _ in range(self.steps)]
        host = {how: self._host_seconds(how) for how in (REPLAYED, REPLAYED_SWAPPED, REGION)}
        kept = sum(_kept_bytes(memory, survey.calls[stand_ins[kind]].block) for kind in kinds)
        plain, plain_peak = self._plain(memory, kept)
        return self._record(survey, kinds, stand_ins, base, memory, timings, plain, plain_peak, host)

    # ------------------------------------------------------------------ trials

    def _survey(self) -> Survey:
        try:
            with surveyed(self.model, self.blocks) as survey:
                self.step()
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
            error = error.with_traceback(None)
            self.meter.tidy()
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

    def _trial(self, observed: set[str], *, rest: str, reads_memory: bool) -> Trial:
        how = {block.name: OBSERVED if block.name in observed else rest for block in self.blocks}
        with trial(self.model, self.blocks, how, self.meter, reads_memory=reads_memory) as result:
            self.step()
        return result

    def _timed(self, observed: set[str]) -> Trial:
        with SwapManager().record_timeline() as spans:
            result = self._trial(observed, rest=REPLAYED_SWAPPED, reads_memory=False)
        self.spans.extend(spans)
        return result

    def _host_seconds(self, rest: str) -> float:
        """How long the host takes to issue a step whose blocks are all treated like this."""
        self.meter.wait()
        how = {block.name: rest for block in self.blocks}
        with trial(self.model, self.blocks, how, self.meter, reads_memory=False) as result:
            self.step()
        return result.points[-1].host_seconds - result.points[0].host_seconds

    def _plain(self, memory: Trial, kept_bytes: int) -> tuple[list[Trial], Trial | None]:
        """The step left alone, timed and weighed; nothing where it does not fit."""
        capacity = self.meter.capacity_bytes()
        peak = max(point.peak_bytes for point in memory.points)
        if capacity is not None and peak + kept_bytes > _FITS_SHARE * capacity:
            return [], None
        try:
            weighed = self._trial(set(), rest=ALONE, reads_memory=True)
            return [self._trial(set(), rest=ALONE, reads_memory=False) for _ in range(self.steps)], weighed
        except Exception as error:
            if not self.meter.is_out_of_memory(error):
                raise
        self.meter.tidy()
        return [], None

    # ------------------------------------------------------------------ the record

    def _record(
        self,
        survey: Survey,
        kinds: list[int],
        stand_ins: list[int],
        base: BaseBytes,
        memory: Trial,
        timings: list[Trial],
        plain: list[Trial],
        weighed: Trial | None,
        host: Mapping[str, float],
    ) -> Profile:
        calls, shared = survey.calls, shared_storages(survey.calls)
        classes = {block.name: block.module.__class__.__name__ for block in self.blocks}
        made = []
        for kind, at in enumerate(stand_ins):
            name = calls[at].block
            members = [number for number, of in enumerate(kinds) if of == kind]
            made.append(
                make_kind(
                    classes[name],
                    _call_of(memory, name),
                    [(one, _call_of(one, name)) for one in timings],
                    forward_seconds=_median([_forward(one, number) for one in plain for number in members]),
                    backward_seconds=_median([_backward(one, number) for one in plain for number in members]),
                )
            )
        given = [sum(n for key, n in call.input_storages.items() if key not in shared) for call in calls]
        made_before_blocks = _made_before_blocks(memory)
        given[0] = min(given[0], made_before_blocks)  # a batch that was there before the step belongs to the base
        rows = tuple(
            Block(name=call.block, kind=kind, input_bytes=nbytes) for call, kind, nbytes in zip(calls, kinds, given)
        )
        config = current_config()
        backend = backend_for(self.device, config)
        assert backend is not None, "a device that has a meter has a backend"
        host_plain = _median([one.points[-1].host_seconds - one.points[0].host_seconds for one in plain])
        return Profile(
            versions=Versions(
                framework="torch",
                framework_version=torch.__version__,
                device=self.meter.device_name,
                library_version=__version__,
                python_version=platform.python_version(),
            ),
            model_fingerprint=fingerprint_of(self.model),
            base=base,
            kinds=tuple(made),
            blocks=rows,
            prologue=_prologue(memory, plain or timings, rows[0].input_bytes),
            epilogue=_epilogue(memory, plain or timings),
            measured=self._measured(plain, weighed),
            link=measure_link(backend, self.meter, self.spans),
            far=far_caps(config),
            engine=engine_settings(config),
            host=HostCost()  # a simulated device is the host, and its time is counted already
            if self.meter.is_simulated
            else _host_cost(host_plain, host, len(calls), sum(len(call.ops) for call in calls)),
        )

    def _measured(self, plain: list[Trial], weighed: Trial | None) -> Measured:
        under = "none"
        if not plain or weighed is None:
            under = "every block replayed"
            weighed = self._trial(set(), rest=REPLAYED, reads_memory=True)
            plain = [self._trial(set(), rest=REPLAYED, reads_memory=False)]
        before, highest = max(zip(weighed.points, weighed.points[1:]), key=lambda pair: pair[1].peak_bytes)
        seconds = _median([one.seconds(one.points[0], one.points[-1]) for one in plain])
        assert seconds is not None, "at least one step was timed"
        return Measured(
            step_seconds=seconds,
            peak_bytes=highest.peak_bytes,
            peak_where=f"after {before.name}",
            reserved_bytes=max(0, self.meter.reserved_bytes()),
            under=under,
        )


def _host_cost(plain: float | None, host: Mapping[str, float], calls: int, ops: int) -> HostCost:
    """Where the step left alone does not fit there is nothing to compare with, and the host counts for nothing."""
    if plain is None:
        return HostCost()
    return HostCost(
        step_seconds=plain,
        replayed_op_seconds=max(0.0, host[REPLAYED] - plain) / ops,
        region_op_seconds=max(0.0, host[REGION] - host[REPLAYED]) / ops,
        swap_seconds=max(0.0, host[REPLAYED_SWAPPED] - host[REPLAYED]) / calls,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _call_of(one: Trial, name: str) -> Call:
    return next(call for call in one.calls if call.block == name)


def _forward(one: Trial, number: int) -> float | None:
    if number >= len(one.calls):
        return None
    call = one.calls[number]
    assert call.forward_begin is not None, "every call has a beginning"
    return None if call.forward_end is None else one.seconds(call.forward_begin, call.forward_end)


def _backward(one: Trial, number: int) -> float | None:
    if number >= len(one.calls):
        return None
    call = one.calls[number]
    if call.backward_begin is None or call.backward_end is None:
        return None
    return one.seconds(call.backward_begin, call.backward_end)


def _kept_bytes(memory: Trial, name: str) -> int:
    seen = _call_of(memory, name).seen
    assert seen is not None, "the block was observed"
    return sum(op.kept_bytes for op in seen.ops)


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
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        for parameter, state in thing.state.items():
            if id(parameter) in mine:
                found += [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
    return found


def _made_before_blocks(memory: Trial) -> int:
    first = memory.calls[0].forward_begin
    assert first is not None, "every call has a beginning"
    return max(0, first.active_bytes - memory.points[0].active_bytes)


def _prologue(memory: Trial, timed: Sequence[Trial], input_bytes: int) -> Segment:
    start, first = memory.points[0], memory.calls[0].forward_begin
    assert first is not None, "every call has a beginning"
    backward, backward_transient = 0.0, 0
    end = memory.calls[0].backward_end
    if end is not None:
        after = [point for point in memory.points if point.host_seconds > end.host_seconds]
        backward_transient = max((point.peak_bytes for point in after), default=0) - end.active_bytes
        backward = _median([_after_blocks(one) for one in timed]) or 0.0
    return Segment(
        forward_seconds=_median([_before_blocks(one) for one in timed]) or 0.0,
        backward_seconds=backward,
        kept_bytes=max(0, _made_before_blocks(memory) - input_bytes),
        forward_transient_bytes=max(0, first.peak_bytes - start.active_bytes),
        backward_transient_bytes=max(0, backward_transient),
    )


def _before_blocks(one: Trial) -> float | None:
    first = one.calls[0].forward_begin
    return None if first is None else one.seconds(one.points[0], first)


def _after_blocks(one: Trial) -> float | None:
    end = one.calls[0].backward_end
    return None if end is None else one.seconds(end, one.points[-1])


@dataclasses.dataclass
class _Turn:
    """Between the last block's forward and its backward."""

    last: Point
    turn: Point  # where the model's forward ended
    begin: Point  # where the last block's backward begins
    inside: list[Point]  # every point between, the first excluded


def _turn_of(one: Trial) -> _Turn | None:
    last = max((call.forward_end for call in one.calls if call.forward_end), key=lambda point: point.host_seconds)
    begins = [call.backward_begin for call in one.calls if call.backward_begin is not None]
    begin = min(begins, key=lambda point: point.host_seconds) if begins else None
    if begin is None:
        return None
    inside = one.points[one.points.index(last) + 1 : one.points.index(begin) + 1]
    turn = next((point for point in reversed(inside) if point.name == "model forward ends"), last)
    return _Turn(last, turn, begin, inside)


def _epilogue(memory: Trial, timed: Sequence[Trial]) -> Segment:
    span = _turn_of(memory)
    if span is None:
        return Segment()
    output = next(call.output_bytes for call in memory.calls if call.forward_end is span.last)
    ground = span.last.active_bytes - output
    at_turn = span.inside.index(span.turn) + 1 if span.turn in span.inside else 0
    forward = max((point.peak_bytes for point in span.inside[:at_turn]), default=span.last.active_bytes)
    backward = max((point.peak_bytes for point in span.inside[at_turn:]), default=span.turn.active_bytes)
    turns = [(one, _turn_of(one)) for one in timed]
    return Segment(
        forward_seconds=_median([one.seconds(turn.last, turn.turn) for one, turn in turns if turn is not None]) or 0.0,
        backward_seconds=_median([one.seconds(turn.turn, turn.begin) for one, turn in turns if turn is not None])
        or 0.0,
        kept_bytes=max(0, span.turn.active_bytes - ground),
        forward_transient_bytes=max(0, forward - ground),
        backward_transient_bytes=max(0, backward - span.turn.active_bytes),
    )
