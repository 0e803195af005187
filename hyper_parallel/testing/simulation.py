"""What a user sees of a simulation, on either framework."""

from __future__ import annotations

from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.testing.streams import Judge, SimulationError, Timeline

__all__ = ["Simulation"]


class Simulation:
    """Counts the bytes of the simulated device, and remembers what went wrong on it."""

    def __init__(self, timing: str, seed: int) -> None:
        self.timeline = Timeline(timing, seed)
        self.judge = Judge()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.swapped_bytes = 0
        self.events: list[tuple[str, int]] = []
        """What the schedule did, in order: (``offload`` | ``drop`` | ``load`` | ``use`` | ``miss``, bytes)."""

    def trace(self, what: str, record: Record) -> None:
        """The schedule did something."""
        self.events.append((what, record.nbytes))

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    @property
    def violations(self) -> list[str]:
        """Every use of bytes at a moment when a real device may not have them."""
        return list(self.judge.violations)

    def count(self, nbytes: int) -> None:
        """Device bytes came, or went."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def raise_violations(self) -> None:
        """Raise the first thing that went wrong where nothing could be raised."""
        if self.judge.violations:
            first, *rest = self.judge.violations
            raise SimulationError(first + (f" (and {len(rest)} more)" if rest else ""))
