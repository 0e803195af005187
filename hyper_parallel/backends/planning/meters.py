"""A device's clock and its memory, read the same way on an accelerator and on the simulated one.

Bytes are *active* bytes: a block that a copy stream still owns counts, as it does on the device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

from hyper_parallel.simulation.simulation import Simulation

__all__ = ["Mark", "Meter", "SimulatedMeter"]

Mark: TypeAlias = Any  # torch.Event | mindspore.runtime.Event | float


class Meter(Protocol):
    """What is read of a device while trial steps run."""

    device_name: str
    is_simulated: bool

    def active_bytes(self) -> int:
        """Bytes in use now."""

    def peak_bytes(self) -> int:
        """The most since :meth:`reset_peak`."""

    def reserved_bytes(self) -> int:
        """The most that the allocator held."""

    def retries(self) -> int:
        """How often the allocator found no memory, gave back what it kept, and asked again; since the process began."""

    def reset_peak(self) -> None:
        """Start a new peak."""

    def capacity_bytes(self) -> int | None:
        """All bytes that this process could use: free, and held by its allocator. None: nothing limits them."""

    def total_bytes(self) -> int | None:
        """The memory of the whole device, all processes included; None where it has no limit."""

    def mark(self) -> Mark:
        """This moment on the device."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Device time between two marks; after :meth:`wait`."""

    def wait(self) -> None:
        """Let the device finish what is queued."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy for about this long, so that what is queued meanwhile then runs without gaps."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether this is the device saying that it is full."""

    def release_cached(self) -> None:
        """After an error: give back what the allocator keeps."""


class SimulatedMeter:
    """The simulated accelerator: its bytes are counted; its time is the host's, or that of its own clock."""

    is_simulated = True

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.speed = simulation.timeline.speed
        self.device_name = "simulated accelerator" if self.speed is None else "simulated accelerator with a clock"

    def active_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._simulation.live_bytes

    def peak_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._simulation.peak_bytes

    def reserved_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._simulation.peak_bytes

    def retries(self) -> int:
        """See :class:`Meter`. The simulated allocator keeps nothing, so it has nothing to give back."""
        return 0

    def reset_peak(self) -> None:
        """See :class:`Meter`."""
        self._simulation.reset_peak()

    def capacity_bytes(self) -> int | None:
        """See :class:`Meter`."""
        return self._simulation.capacity_bytes

    def total_bytes(self) -> int | None:
        """See :class:`Meter`."""
        return self._simulation.capacity_bytes

    def mark(self) -> Mark:
        """See :class:`Meter`."""
        return time.perf_counter() if self.speed is None else self._simulation.seconds

    def seconds(self, start: Mark, end: Mark) -> float:
        """See :class:`Meter`."""
        return max(0.0, float(end) - float(start))

    def wait(self) -> None:
        """See :class:`Meter`."""

    def hold(self, seconds: float) -> None:
        """See :class:`Meter`."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See :class:`Meter`."""
        return isinstance(error, MemoryError)

    def release_cached(self) -> None:
        """See :class:`Meter`."""
