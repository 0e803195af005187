"""The peak of each moment of a step, as the model is now: read where blocks begin and end.

It reads and resets the device's peak about twice per block, so it is for a step whose time is not measured. The hooks are on
the modules of the blocks, around whatever was applied to them, and on tensors between them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.backends.planning.segments import call_order
from hyper_parallel.backends.planning.trials import TrialPoint, TrialStep
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.planner.survey import on_backward
from hyper_parallel.platform.torch import compat
from hyper_parallel.records.moments import MOMENTS, MomentBytes

__all__ = ["MomentPeaks", "moments_of_trial", "watched_moments"]

_BEFORE, _FORWARD, _HEAD, _BACKWARD, _AFTER = range(len(MOMENTS))


class MomentPeaks:
    """Which moment it is, and the highest that each was."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._now = _BEFORE
        self._peaks = [0] * len(MOMENTS)
        self._was_watched = False

    def begin(self) -> None:
        """A step begins."""
        self._meter.reset_peak()
        self._now = _BEFORE
        self._was_watched = True

    def enter(self, moment: int) -> None:
        """The moment before is over."""
        self._peaks[self._now] = max(self._peaks[self._now], self._meter.peak_bytes())
        self._meter.reset_peak()
        self._now = moment

    @property
    def highest(self) -> int:
        """Of everything so far."""
        return max(self._peaks)

    def peaks(self) -> MomentBytes | None:
        """By moment, 0 for one that did not come; None where blocks did not run."""
        return MomentBytes.of(self._peaks) if self._peaks[_FORWARD] and self._peaks[_HEAD] else None

    # ------------------------------------------------------------------ hooks

    def begin_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a block's forward."""
        if not torch.is_grad_enabled() or is_in_backward():
            return
        if self._now in (_BEFORE, _BACKWARD, _AFTER):  # the first block of a pass: its backward is the last
            on_backward((args, kwargs), lambda _: self.enter(_AFTER))
        self.enter(_FORWARD)

    def end_block(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """After a block's forward: until the next block begins, this may be the head."""
        if torch.is_grad_enabled() and not is_in_backward():
            self.enter(_HEAD)
            on_backward(output, lambda _: self.enter(_BACKWARD))


@contextlib.contextmanager
def watched_moments(model: nn.Module, names: Sequence[str], peaks: MomentPeaks) -> Iterator[None]:
    """One step is run inside."""
    modules = dict(model.named_modules())
    blocks = [modules[name] for name in dict.fromkeys(names) if name in modules]
    with contextlib.ExitStack() as watched:
        for block in blocks:
            if compat.is_compiled_in_place(block):  # its hooks would be traced into its graph
                watched.enter_context(compat.around_compiled_call(block, functools.partial(_around, peaks, block)))
            else:
                watched.callback(block.register_forward_pre_hook(peaks.begin_block, with_kwargs=True).remove)
                watched.callback(block.register_forward_hook(peaks.end_block).remove)
        if blocks:
            peaks.begin()
        yield
        if blocks:
            peaks.enter(_BEFORE)


def _around(peaks: MomentPeaks, block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    peaks.begin_block(block, args, kwargs)
    output = call(*args, **kwargs)
    peaks.end_block(block, args, output)
    return output


def moments_of_trial(trial: TrialStep) -> MomentBytes | None:
    """The same of a trial step that read memory; None where it had no backward."""
    ends = call_order(trial)
    if ends is None:
        return None
    peaks = [0] * len(MOMENTS)
    moment = _BEFORE
    following: dict[int, TrialPoint] = dict(enumerate(ends))
    for point in trial.points:
        peaks[moment] = max(peaks[moment], point.peak_bytes)
        if moment in following and point is following[moment]:
            moment += 1
    return MomentBytes.of(peaks)
