"""What measured steps taught about a profile: factors of its seconds, and bytes for each moment of the step.

A step is slower than predicted because the device is, because the host is (issuing ops, running regions, moving values) or
because copies are. These are separate factors: a plan with many swaps that comes out slow says nothing about ops.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.record_files import require

if TYPE_CHECKING:
    from hyper_parallel.planner.plan import Plan

__all__ = ["FACTORS", "Corrections"]

FACTORS: Final = ("work_scale", "issue_scale", "region_scale", "swap_scale", "link_scale", "stall_cost")
_OF_ALL_WORK: Final = ("work_scale", "issue_scale", "region_scale", "swap_scale")
_LEAST: Final = 0.5  # what one plan's ratio may change
_MOST: Final = 2.0
_NO_BYTES: Final = MomentBytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corrections:
    """What measuring applied plans taught: fed back into the next plan."""

    moments: MomentBytes = _NO_BYTES  # measured less predicted; added to every peak of that moment
    work_scale: float = 1.0  # multiplies what the device computes
    issue_scale: float = 1.0  # multiplies what the host takes to issue blocks as they are
    region_scale: float = 1.0  # multiplies what the host takes for regions: recording ops, running them again
    swap_scale: float = 1.0  # multiplies what the host takes for swapped values
    link_scale: float = 1.0  # multiplies the seconds of copies
    stall_cost: float = 1.0  # the part of a simulated wait for copies that shows in the step

    def __post_init__(self) -> None:
        for name in FACTORS:
            value = getattr(self, name)
            is_right = math.isfinite(value) and (value > 0 or (name == "stall_cost" and value == 0))
            require(is_right, f"Corrections.{name}: {value} must be above 0")

    @classmethod
    def of_work(cls, scale: float, *, moments: MomentBytes = _NO_BYTES) -> Corrections:
        """Everything that the device computes and the host issues, multiplied by one factor."""
        scale = min(max(scale, _LEAST), _MOST)
        return cls(moments=moments, **dict.fromkeys(_OF_ALL_WORK, scale))

    def after(
        self,
        plan: Plan,
        *,
        measured_peak_bytes: int,
        measured_step_seconds: float | None = None,
        measured_moments: MomentBytes | None = None,
    ) -> Corrections:
        """These, and what one step under ``plan`` turned out to be.

        One ratio of seconds cannot say what was slow, so it scales all work. ``fit_memory`` knows several plans and more.
        """
        scale = 1.0 if measured_step_seconds is None else measured_step_seconds / plan.predicted_step_seconds
        scale = min(max(scale, _LEAST), _MOST)
        factors = {name: getattr(self, name) * scale for name in _OF_ALL_WORK}
        predicted = plan.predicted.moments or MomentBytes(blocks_backward=plan.predicted_peak_bytes)
        return dataclasses.replace(self.with_peak(predicted, measured_peak_bytes, measured_moments), **factors)

    def with_peak(
        self, predicted: MomentBytes, measured_peak_bytes: int, measured: MomentBytes | None = None
    ) -> Corrections:
        """These, with the bytes of the moments as they were measured; ``predicted`` is what these corrections gave.

        The moment of the peak was as high as measured, and no moment was higher. A lower moment is never raised: what a
        moment holds when it begins may be left over from the one before, and would be counted for all of it.
        """
        known = predicted if measured is None else measured
        known = known.joined(predicted, lambda mine, theirs: min(mine or theirs, theirs, measured_peak_bytes))
        highest = list(predicted if measured is None else measured)
        at = highest.index(max(highest))
        right = [measured_peak_bytes if other == at else nbytes for other, nbytes in enumerate(known)]
        missed = MomentBytes.of(right).joined(predicted, lambda mine, theirs: mine - theirs)
        return dataclasses.replace(self, moments=self.moments.joined(missed, lambda mine, more: mine + more))
