"""How times of a run are written: in the terminal's table and on the page alike."""

from __future__ import annotations

from hyper_parallel.records.run_record import StepRecord

__all__ = ["show_peak_change", "show_seconds", "show_time", "show_time_change"]


def show_seconds(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def show_peak_change(step: StepRecord, first: StepRecord) -> str:
    """By how much a peak differs from the first way's; ``same`` below half a percent."""
    if not first.peak_bytes:
        return ""
    change = step.peak_bytes / first.peak_bytes - 1
    return "same" if abs(change) < 0.005 else f"{change:+.0%}"


def show_time(step: StepRecord) -> str:
    """The median of the timed steps with their spread: ``12.3 ±0.4 ms``."""
    spread = step.spread_seconds
    if not spread:
        return show_seconds(step.step_seconds)
    if step.step_seconds < 1:
        return f"{step.step_seconds * 1e3:.1f} ±{spread * 1e3:.1f} ms"
    return f"{step.step_seconds:.2f} ±{spread:.2f} s"


def show_time_change(step: StepRecord, first: StepRecord) -> str:
    """By how much a step is slower than the first way's; ``same`` where the spreads overlap."""
    if not first.step_seconds or not step.step_seconds:
        return ""
    change = step.time_change(first)
    return "same" if change is None else f"{change:+.0%}"
