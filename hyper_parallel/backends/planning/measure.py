"""What a step really takes: peak of active bytes, time, and what the engine had to wait for."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable
from typing import Any

from hyper_parallel.backends.planning.meters import Meter
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["incomplete", "measure"]


def measure(
    step: Callable[[], Any],
    meter: Meter,
    *,
    steps: int,
    warmup: int,
    watch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    moments: Callable[[], MomentBytes | None] | None = None,
) -> StepMeasure:
    """Peak and time of the step. The first steps pin far memory and learn the link; they are not measured.

    Every measured step begins on an idle device: where the host is the slower one, a step that follows another without a pause
    hides what the host takes at its beginning, and a training loop that reads its loss does not.

    ``watch`` is around the last of those, and ``moments`` says afterwards which peaks it saw.
    """
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
        meter.wait()
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
        moments=None if moments is None else moments(),
        retries=meter.retries() - retries,
    )


def incomplete(meter: Meter, *, highest: int = 0) -> StepMeasure:
    """The measure of a step that did not fit. ``highest``: the peak before the meter was last reset."""
    peak, reserved = max(meter.peak_bytes(), highest), meter.reserved_bytes()
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
