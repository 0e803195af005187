"""What was recorded of a run: the record that measuring writes and the report prints.

A run is one model and one machine, and the step in one or several ways (left alone, replayed, swapped, planned). Times are
microseconds from the start of the recorded step; on an accelerator they are the device's, elsewhere the host's.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Final

from hyper_parallel.planner.profile import Versions
from hyper_parallel.planner.records import load_record, require, save_record

__all__ = [
    "PROCESS_PART",
    "Curve",
    "FateTotal",
    "Forecasted",
    "OpTotal",
    "RecordedFate",
    "RunRecord",
    "StepRecord",
    "Track",
    "WorkSpan",
]

SCHEMA: Final = "hyper_parallel.run/1"
STEP_SCHEMA: Final = "hyper_parallel.step/1"
MOST_POINTS: Final = 20_000
MOST_STEPS: Final = 64
PROCESS_PART: Final = "process without the model"  # of a peak that is a whole process's memory


class Track(str, enum.Enum):
    """The line of the timeline that something is drawn on."""

    FORWARD = "forward"
    REPLAY = "replay"
    BACKWARD = "backward"
    STALL = "stall"  # compute waits for a copy
    COPY_OUT = "copy out"
    COPY_BACK = "copy back"


class RecordedFate(str, enum.Enum):
    """What became of saved values, as the engine counted it."""

    SAVED = "saved"  # stayed because a policy or plan said so
    RECOMPUTED = "recomputed"
    SWAPPED = "swapped"
    KEPT = "kept"  # could have left and stayed; the reason says why


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Memory over the recorded step."""

    times_us: tuple[float, ...] = ()
    nbytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.times_us) == len(self.nbytes) <= MOST_POINTS,
            f"Curve: {len(self.times_us)} times and {len(self.nbytes)} values; one each, {MOST_POINTS} at most",
        )
        require(
            all(before <= after for before, after in zip(self.times_us, self.times_us[1:])),
            "Curve.times_us: does not rise",
        )
        require(min(self.nbytes, default=0) >= 0, "Curve.nbytes: has a negative value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkSpan:
    """Something that took time."""

    track: Track
    name: str = ""
    start_us: float
    end_us: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        require(self.start_us <= self.end_us, f"WorkSpan {self.name!r}: ends at {self.end_us}, before {self.start_us}")
        require(self.nbytes >= 0, f"WorkSpan {self.name!r}: {self.nbytes} bytes is negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FateTotal:
    """Bytes of one fate and one reason, per step."""

    fate: RecordedFate
    reason: str = ""
    nbytes: int

    def __post_init__(self) -> None:
        require(self.nbytes >= 0, f"FateTotal {self.fate.value}: {self.nbytes} bytes is negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpTotal:
    """All instances of one op in one step, by what becomes of their outputs."""

    op: str
    count: int
    saved_bytes: int = 0
    recomputed_bytes: int = 0
    swapped_bytes: int = 0
    kept_bytes: int = 0  # of blocks that are left alone: what autograd holds
    reason: str = ""  # for the largest of them

    def __post_init__(self) -> None:
        require(bool(self.op), "OpTotal.op: is empty")
        for field in ("count", "saved_bytes", "recomputed_bytes", "swapped_bytes", "kept_bytes"):
            require(getattr(self, field) >= 0, f"OpTotal {self.op}.{field}: {getattr(self, field)} is negative")

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.saved_bytes + self.recomputed_bytes + self.swapped_bytes + self.kept_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecasted:
    """What a plan said of the step before it ran."""

    budget_bytes: int
    peak_bytes: int
    peak_where: str
    peak_parts: dict[str, int]
    step_seconds: float
    compute_seconds: float
    replay_seconds: float
    exposed_seconds: float
    swapped_out_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The step, run one way."""

    name: str  # "swap"
    what: str = ""  # "swap_wrapper(layer)"
    peak_bytes: int
    peak_where: str = ""
    peak_parts: dict[str, int] = dataclasses.field(default_factory=dict)
    step_seconds: float
    out_bytes: int = 0  # to far memory, per step
    back_bytes: int = 0
    exposed_seconds: float = 0.0  # compute waiting for copies, per step
    losses: tuple[float, ...] = ()
    gradients: str = ""  # a fingerprint of every gradient of every step
    memory: Curve = Curve()
    spans: tuple[WorkSpan, ...] = ()
    fates: tuple[FateTotal, ...] = ()
    ops: tuple[OpTotal, ...] = ()
    forecast: Forecasted | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "StepRecord.name: is empty")
        require(self.peak_bytes >= 0, f"StepRecord {self.name}: a peak of {self.peak_bytes} bytes is negative")
        require(self.step_seconds >= 0, f"StepRecord {self.name}: {self.step_seconds} s is negative")
        require(
            len(self.spans) <= MOST_POINTS, f"StepRecord {self.name}: {len(self.spans)} spans; {MOST_POINTS} at most"
        )

    @property
    def process_bytes(self) -> int:
        """What the process holds without the model, where peaks are a whole process's; else 0."""
        return self.peak_parts.get(PROCESS_PART, 0)

    @property
    def model_peak_bytes(self) -> int:
        """The peak without what the process holds anyway: what a prediction speaks of."""
        return max(0, self.peak_bytes - self.process_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=STEP_SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepRecord:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=STEP_SCHEMA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: a machine, a model, and its step in one or several ways."""

    title: str
    created: str = ""  # ISO 8601, UTC
    versions: Versions
    memory_kind: str = "device memory"  # what the bytes of the curves and peaks are
    budget_bytes: int | None = None
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    machine: dict[str, str] = dataclasses.field(default_factory=dict)
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(1 <= len(self.steps) <= MOST_STEPS, f"RunRecord.steps: {len(self.steps)}; 1 to {MOST_STEPS} are read")
        names = [step.name for step in self.steps]
        require(len(set(names)) == len(names), f"RunRecord.steps: names must differ, got {', '.join(names)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=SCHEMA)
