"""What a step really takes, as the model is now: peak of active bytes, time, and what the engine had to wait for."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.backends.torch.planner.blocks import device_of, require_module
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.backends.torch.planner.moment_peaks import MomentPeaks, watched_moments
from hyper_parallel.backends.torch.planner.survey import require_step
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
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
) -> StepMeasure:
    """Run the step a few times and leave no trace; or leave that to a caller who guards the whole.

    The first steps pin far memory, make gradients and learn the link; they are not measured. Gradients stay between
    steps, as in a run that accumulates: the larger of two cases. With the names of the ``blocks``, the last step of them also
    says what the peak of each moment is. Where the allocator retried in a measured step, what earlier steps left in its cache
    may be the reason: the cache is given back, and the steps are measured once more.
    """
    who = "measure_step"
    require_module(model, who)
    require_step(step, who)
    device = device_of(model, who)
    meter = meter_for(device, who=who)
    moments = MomentPeaks(meter)
    try:
        with contextlib.nullcontext() if is_guarded else restored_after(model, device, who=who):
            watch = lambda: watched_moments(model, blocks, moments)  # noqa: E731
            measured = _measure(step, meter, moments, watch, steps=steps, warmup=warmup)
            if measured.retries:
                meter.release_cached()
                measured = _measure(step, meter, moments, watch, steps=steps, warmup=warmup)
            return measured
    except Exception as error:
        if not meter.is_out_of_memory(error):
            raise
    peak, reserved = max(meter.peak_bytes(), moments.highest), meter.reserved_bytes()
    meter.release_cached()
    return StepMeasure(
        peak_bytes=peak,
        step_seconds=float("inf"),
        reserved_bytes=reserved,
        swapped_out_bytes=0,
        exposed_copy_seconds=0.0,
        late_loads=0,
        misses=0,
        is_complete=False,
    )


def _measure(
    step: Callable[[], Any],
    meter: Meter,
    moments: MomentPeaks,
    watch: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    steps: int,
    warmup: int,
) -> StepMeasure:
    meter.reset_peak()
    for _ in range(warmup - 1):
        step()
    with watch():
        step()
    gc.collect()
    meter.wait()
    meter.reset_peak()
    before, retries = SwapManager().stats(), meter.retries()
    times = []
    for _ in range(steps):
        start = meter.mark()
        step()
        times.append((start, meter.mark()))
    meter.wait()
    peak, reserved = meter.peak_bytes(), meter.reserved_bytes()
    after = SwapManager().stats()
    return StepMeasure(
        peak_bytes=peak,
        step_seconds=statistics.median(meter.seconds(start, end) for start, end in times),
        reserved_bytes=reserved,
        swapped_out_bytes=(after.swapped_out_bytes - before.swapped_out_bytes) // steps,
        exposed_copy_seconds=(after.exposed_copy_us - before.exposed_copy_us) / 1e6 / steps,
        late_loads=after.late_loads - before.late_loads,
        misses=after.misses - before.misses,
        moments=moments.peaks(),
        retries=meter.retries() - retries,
    )
