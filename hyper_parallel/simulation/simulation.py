"""What a user sees of a simulation, on either framework."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.simulation.streams import AccessLog, SimulationError, Timeline

__all__ = ["Simulation"]


class Simulation:
    """Counts the bytes of the simulated device, and remembers what went wrong on it."""

    def __init__(self, timing: str, seed: int) -> None:
        self.timeline = Timeline(timing, seed)
        self.accesses = AccessLog()
        self.count_freed_bytes: Callable[[], None] = _nothing
        """Called before the bytes are read, where a framework does not report at once that device bytes are gone."""
        self.capacity_bytes: int | None = None
        """The device's memory; None: there is no end to it."""
        self._live_bytes = 0
        self._peak_bytes = 0
        self.swapped_bytes = 0
        self.events: list[tuple[str, int]] = []
        """What the schedule did, in order: (``offload`` | ``drop`` | ``load`` | ``use`` | ``miss``, bytes)."""
        self.num_holds = 0
        self.skip_holds: Collection[int] = ()
        """For tests: the records of the copies with these numbers, counted from 0, do not hold their device bytes."""

    def trace(self, what: str, record: Record) -> None:
        """Record what the schedule did with a record of the engine."""
        self.events.append((what, record.nbytes))
        if what in ("offload", "load"):  # a copy was queued, and the record holds the device's side of it
            if self.num_holds in self.skip_holds:
                record.device_bytes = None
            self.num_holds += 1

    @property
    def seconds(self) -> float:
        """The device's clock: when its compute has done everything so far. 0 for a device without a speed."""
        return self.timeline.compute.seconds

    @property
    def live_bytes(self) -> int:
        """The device bytes that live now."""
        self.count_freed_bytes()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that lived at one time since the last ``reset_peak``."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes = self.live_bytes

    @property
    def violations(self) -> list[str]:
        """Every use of bytes at a moment when a real device may not have them."""
        return list(self.accesses.violations)

    def count(self, nbytes: int) -> None:
        """Add to the device bytes that live now; negative where some are gone."""
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def raise_if_full(self, what: str) -> None:
        """Refuse what an op made where the device cannot hold it, as a device's allocator does."""
        if self.capacity_bytes is not None and self._live_bytes > self.capacity_bytes:
            raise MemoryError(
                f"simulated accelerator: out of memory in {what}: {self._live_bytes} bytes live, and it has "
                f"{self.capacity_bytes}"
            )

    def raise_violations(self) -> None:
        """Raise the first violation that could not be raised where it happened."""
        if self.accesses.violations:
            first, *rest = self.accesses.violations
            raise SimulationError(first + (f" (and {len(rest)} more)" if rest else ""))


def _nothing() -> None:
    """Nothing to count: the framework reports every death at once."""
