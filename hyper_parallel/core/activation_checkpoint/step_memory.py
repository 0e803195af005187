"""What the first step would have held, and what it held: the figures of the line about memory.

A recomputed region says how many bytes its forward handed to autograd and did not keep (``dropped``). At the peak of the
step one region is made again, so without the library the peak would have been higher by all that was dropped and swapped,
less the largest region. That is an estimate: what is in flight at the peak is counted on both sides.
"""

from __future__ import annotations

import dataclasses

from hyper_parallel.config import show_bytes

__all__ = ["MemoryChange", "StepMemory"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """Peak with and without the library; seconds where they are known."""

    without_bytes: int
    with_bytes: int
    is_predicted: bool  # by a plan; else estimated from what was dropped
    is_measured: bool = False  # with_bytes was measured
    without_seconds: float | None = None
    with_seconds: float | None = None

    def measured(self, peak_bytes: int | None) -> MemoryChange:
        """The same with a measured peak; None: as it is."""
        return self if peak_bytes is None else dataclasses.replace(self, with_bytes=peak_bytes, is_measured=True)

    def sentence(self) -> str:
        """In words, without a full stop."""
        share = self.with_bytes / self.without_bytes - 1 if self.without_bytes else 0.0
        change = f" ({share:+.0%})" if abs(share) >= 0.005 else ""
        with_words = f"{'' if self.is_measured else 'predicted '}peak {show_bytes(self.with_bytes)}"
        without_words = f"{'' if self.is_predicted else 'about '}{show_bytes(self.without_bytes)}"
        if self.without_bytes <= self.with_bytes:
            words = f"{with_words}, not less than without hyper_parallel ({without_words})"
        else:
            words = f"{with_words} instead of {without_words}{change}"
        if self.without_seconds and self.with_seconds:
            words += f", step time {self.with_seconds / self.without_seconds - 1:+.0%} ({self._source()})"
        return words

    def _source(self) -> str:
        return "predicted" if self.is_predicted else "measured"


@dataclasses.dataclass(kw_only=True)
class StepMemory:
    """What recomputed regions of the first step did not keep."""

    dropped_bytes: int = 0
    largest_bytes: int = 0  # of one region
    input_bytes: int = 0  # of the regions whose inputs are swapped
    peak_before_bytes: int | None = None  # of the device, when the first region ended

    def add_region(self, dropped_bytes: int) -> None:
        """Count one call of a recomputed region."""
        self.dropped_bytes += dropped_bytes
        self.largest_bytes = max(self.largest_bytes, dropped_bytes)

    def less_bytes(self, *, saved_bytes: int, swapped_bytes: int) -> int:
        """How much less is held at the end of forward. A value that a policy swaps was dropped by its region too."""
        dropped = max(0, self.dropped_bytes - saved_bytes)
        return max(dropped + min(self.input_bytes, swapped_bytes), swapped_bytes)

    def change(self, *, peak_bytes: int | None, less_bytes: int) -> MemoryChange | None:
        """Peak with and without; None where the device has no counter, or where its peak is not of this step."""
        saved = less_bytes - self.largest_bytes
        if peak_bytes is None or saved <= 0:
            return None
        if self.peak_before_bytes is not None and peak_bytes <= self.peak_before_bytes:
            return None
        return MemoryChange(
            without_bytes=peak_bytes + saved, with_bytes=peak_bytes, is_predicted=False, is_measured=True
        )
