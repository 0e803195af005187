"""One stretch of time in a recorded step, and the track of the timeline that it belongs to."""

from __future__ import annotations

import dataclasses
import enum

from hyper_parallel.records.record_files import require

__all__ = ["Track", "WorkSpan"]


class Track(str, enum.Enum):
    """The line of the timeline that a span is drawn on."""

    FORWARD = "forward"
    REPLAY = "replay"
    BACKWARD = "backward"
    STALL = "stall"  # compute waits for a copy
    COPY_OUT = "copy out"
    COPY_BACK = "copy back"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkSpan:
    """Work, a copy or a wait, in microseconds from the start of the recorded step."""

    track: Track
    name: str = ""
    start_us: float
    end_us: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        require(self.start_us <= self.end_us, f"WorkSpan {self.name!r}: ends at {self.end_us}, before {self.start_us}")
        require(self.nbytes >= 0, f"WorkSpan {self.name!r}: {self.nbytes} bytes is negative")
