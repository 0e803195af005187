"""What a few steps took: peak, time, and what compute waited for."""

from __future__ import annotations

import dataclasses

from hyper_parallel.records.moments import MomentBytes

__all__ = ["StepMeasure"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMeasure:
    """A few steps, measured. Bytes and seconds are per step."""

    peak_bytes: int
    step_seconds: float
    reserved_bytes: int
    swapped_out_bytes: int
    exposed_copy_seconds: float
    late_loads: int
    misses: int
    is_complete: bool = True  # False: the device ran out of memory, and the peak is what it got to
    moments: MomentBytes | None = None  # the peak of each moment; None: not known
    retries: int = 0  # how often the allocator found no memory, gave back what it kept, and asked again
