"""What a step really takes, as the model is now: peak of active bytes, time, and what the engine had to wait for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.backends.planning.measure import incomplete, measure
from hyper_parallel.backends.torch.planner.blocks import device_of, require_module
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.backends.torch.planner.moment_peaks import MomentPeaks, watched_moments
from hyper_parallel.backends.torch.planner.survey import require_step
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["measure_step"]


def measure_step(
    model: Any,
    step: Callable[[], Any],
    *,
    steps: int = 3,
    warmup: int = 2,
    is_guarded: bool = False,
    blocks: Sequence[str] = (),
    meter: Meter | None = None,
) -> StepMeasure:
    """Run the step a few times and leave no trace; or leave that to a caller who guards the whole.

    The first steps pin far memory, make gradients and learn the link; they are not measured. Gradients stay between
    steps, as in a run that accumulates: the larger of two cases. With the names of the ``blocks``, the last step of them also
    says what the peak of each moment is. Where the allocator retried in a measured step, what earlier steps left in its cache
    may be the reason: the cache is given back, and the steps are measured once more. ``meter``: another than the device's own.
    """
    who = "measure_step"
    require_module(model, who)
    require_step(step, who)
    device = device_of(model, who)
    meter = meter or meter_for(device, who=who)
    moments = MomentPeaks(meter)
    watch = functools.partial(watched_moments, model, blocks, moments)
    run = functools.partial(measure, step, meter, steps=steps, warmup=warmup, watch=watch, moments=moments.peaks)
    try:
        with contextlib.nullcontext() if is_guarded else restored_after(model, device, who=who):
            measured = run()
            if measured.retries:
                meter.release_cached()
                measured = run()
            return measured
    except Exception as error:
        if not meter.is_out_of_memory(error):
            raise
    return incomplete(meter, highest=moments.highest)
