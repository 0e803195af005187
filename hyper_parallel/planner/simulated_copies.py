"""What moves in a simulated step: a swapped value, and the way to one far memory."""

from __future__ import annotations

from typing import Final

from hyper_parallel.planner.profile import Link

__all__ = ["Lane", "SimulatedRecord"]

# Where a record's bytes are.
TAIL, LEAVING, FAR, COMING, CANCELLED, STUCK, GONE = range(7)
ON_DEVICE: Final = frozenset({TAIL, LEAVING, COMING, CANCELLED, STUCK})


class SimulatedRecord:
    """A swapped value while a step is simulated."""

    __slots__ = ("far", "in_end", "is_ahead", "is_read_locally", "is_wanted", "nbytes", "out_end", "ready", "state")

    def __init__(self, nbytes: int, ready: float) -> None:
        self.nbytes = nbytes
        self.state = TAIL
        self.ready = ready
        self.out_end = 0.0
        self.in_end = 0.0
        self.is_read_locally = True
        self.is_wanted = False
        self.is_ahead = False  # loaded, or kept, before it was asked for
        self.far: Lane | None = None


class Lane:
    """One far memory: two directions and a cap."""

    __slots__ = ("cap", "compute_seconds", "copy_seconds", "in_free", "in_seconds", "out_free", "out_seconds", "used")

    def __init__(self, link: Link, cap: int, scale: float) -> None:
        self.copy_seconds = scale * link.copy_seconds
        self.out_seconds = scale / link.out_bytes_per_second  # for a byte
        self.in_seconds = scale / link.in_bytes_per_second
        self.compute_seconds = scale * link.compute_seconds_per_byte
        self.cap = cap
        self.used = 0
        self.out_free = 0.0
        self.in_free = 0.0
