"""What a plan predicts of one training step."""

from __future__ import annotations

import dataclasses

from hyper_parallel.records.moments import MomentBytes

__all__ = ["Prediction"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Peak, time and bytes moved of one step, as the planner's simulator computed them."""

    peak_bytes: int
    peak_where: str
    peak_parts: dict[str, int]  # what the peak is made of, by name
    step_seconds: float
    compute_seconds: float  # the step's own work
    replay_seconds: float  # work done again
    exposed_seconds: float  # compute waiting for copies
    host_seconds: float = 0.0  # issuing it; the step cannot be shorter
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    host_bytes: int = 0  # far memory at its fullest
    disk_bytes: int = 0
    moments: MomentBytes | None = None  # the peak of each moment; None: a plan of an earlier version
