"""What was measured of a run: the record that measuring writes and the report renders.

A run is one model on one machine, and its step in one or several ways (left alone, replayed, swapped, planned). Times are
microseconds from the start of the recorded step; on an accelerator they are the device's, elsewhere the host's.

Older files
-----------
Schema 1 had a fate of its own for values that stayed ("kept") and called the prediction of a plan ``forecast``.
Both schemas are read; files are written with schema 2.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence
from typing import Any, Final

from hyper_parallel.fates import Fate
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.record_files import load_record, require, save_record
from hyper_parallel.records.versions import Versions
from hyper_parallel.records.work_span import WorkSpan

__all__ = [
    "PROCESS_PART",
    "FateTotal",
    "MemoryCurve",
    "OpTotal",
    "RegionTotal",
    "RunRecord",
    "StepRecord",
    "shown_names",
]

SCHEMA: Final = "hyper_parallel.run/2"
STEP_SCHEMA: Final = "hyper_parallel.step/2"
MOST_POINTS: Final = 20_000
MOST_STEPS: Final = 64
_MOST_NAMES: Final = 4  # that a line or a cell shows
PROCESS_PART: Final = "process without the model"  # of a peak that is a whole process's memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory over the recorded step."""

    times_us: tuple[float, ...] = ()
    nbytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.times_us) == len(self.nbytes) <= MOST_POINTS,
            f"MemoryCurve: {len(self.times_us)} times and {len(self.nbytes)} values; one each, {MOST_POINTS} at most",
        )
        require(
            all(before <= after for before, after in zip(self.times_us, self.times_us[1:])),
            "MemoryCurve.times_us: does not rise",
        )
        require(min(self.nbytes, default=0) >= 0, "MemoryCurve.nbytes: has a negative value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FateTotal:
    """Bytes of one fate and one reason, per step.

    A value that stays because a policy or plan says so is ``SAVE`` without a reason. One that could have left and stayed is
    ``SAVE`` with the reason that the engine counted.
    """

    fate: Fate
    reason: str = ""
    nbytes: int

    def __post_init__(self) -> None:
        require(self.nbytes >= 0, f"FateTotal {self.fate.value}: {self.nbytes} bytes is negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegionTotal:
    """The recomputed regions of one step that are made again in one way."""

    reason: str = ""  # why their Python runs again; empty: they run from a tape
    count: int  # of calls
    names: tuple[str, ...] = ()  # their modules, each once

    def __post_init__(self) -> None:
        require(self.count >= 0, f"RegionTotal {self.reason!r}: a count of {self.count} is negative")


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
class StepRecord:
    """The step, run one way."""

    name: str  # "swap"
    what: str = ""  # "swap_wrapper(layer)"
    peak_bytes: int
    peak_where: str = ""
    peak_parts: dict[str, int] = dataclasses.field(default_factory=dict)
    step_seconds: float  # the median of ``seconds``, where there are some
    seconds: tuple[float, ...] = ()  # every timed step; empty in files of versions that kept the median only
    out_bytes: int = 0  # to far memory, per step
    back_bytes: int = 0
    exposed_seconds: float = 0.0  # compute waiting for copies, per step
    losses: tuple[float, ...] = ()
    gradients: str = ""  # a fingerprint of every gradient of every step
    memory: MemoryCurve = MemoryCurve()
    spans: tuple[WorkSpan, ...] = ()
    fates: tuple[FateTotal, ...] = ()
    ops: tuple[OpTotal, ...] = ()
    regions: tuple[RegionTotal, ...] = ()  # empty also in files of versions that had no recorder
    predicted: Prediction | None = None  # what the plan that it ran under said before
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "StepRecord.name: is empty")
        require(self.peak_bytes >= 0, f"StepRecord {self.name}: a peak of {self.peak_bytes} bytes is negative")
        require(self.step_seconds >= 0, f"StepRecord {self.name}: {self.step_seconds} s is negative")
        require(min(self.seconds, default=0.0) >= 0, f"StepRecord {self.name}.seconds: has a negative value")
        require(
            len(self.spans) <= MOST_POINTS, f"StepRecord {self.name}: {len(self.spans)} spans; {MOST_POINTS} at most"
        )

    @property
    def process_bytes(self) -> int:
        """What the process holds without the model, where peaks are a whole process's; else 0."""
        return self.peak_parts.get(PROCESS_PART, 0)

    @property
    def model_peak_bytes(self) -> int:
        """The peak without what the process holds anyway: what a prediction is about."""
        return max(0, self.peak_bytes - self.process_bytes)

    @property
    def spread_seconds(self) -> float:
        """Half of what lies between the fastest and the slowest timed step; 0 where one was timed."""
        return (max(self.seconds) - min(self.seconds)) / 2 if self.seconds else 0.0

    def time_change(self, other: StepRecord) -> float | None:
        """By which share this step takes longer than ``other``; None where the spreads overlap: no difference was measured."""
        if not other.step_seconds or not self.step_seconds:
            return None
        mine, theirs = self.seconds or (self.step_seconds,), other.seconds or (other.step_seconds,)
        if (len(mine) > 1 or len(theirs) > 1) and min(mine) <= max(theirs) and min(theirs) <= max(mine):
            return None
        return self.step_seconds / other.step_seconds - 1

    def timed(self, seconds: Sequence[float]) -> StepRecord:
        """The same with other timed steps. Curve and spans are stretched: they then end when the median step ends.

        The observed step is slower than one that is not observed. Drawn as it was, it would contradict the table.
        """
        median = statistics.median(seconds)
        last_us = max([*self.memory.times_us[-1:], *(span.end_us for span in self.spans)], default=0.0)
        scale = median * 1e6 / last_us if last_us else 1.0
        return dataclasses.replace(
            self,
            step_seconds=median,
            seconds=tuple(seconds),
            exposed_seconds=min(self.exposed_seconds * min(1.0, scale), median),
            memory=dataclasses.replace(self.memory, times_us=tuple(at * scale for at in self.memory.times_us)),
            spans=tuple(
                dataclasses.replace(span, start_us=span.start_us * scale, end_us=span.end_us * scale)
                for span in self.spans
            ),
        )

    def without_process(self) -> StepRecord:
        """The same, with what the process holds without the model taken off peak and curve."""
        nbytes = self.process_bytes
        return dataclasses.replace(
            self,
            peak_bytes=self.model_peak_bytes,
            peak_parts={name: size for name, size in self.peak_parts.items() if name != PROCESS_PART},
            memory=dataclasses.replace(
                self.memory, nbytes=tuple(max(0, value - nbytes) for value in self.memory.nbytes)
            ),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=STEP_SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepRecord:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=STEP_SCHEMA, older={"hyper_parallel.step/1": _step_from_schema_1})


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

    @property
    def budget_line_bytes(self) -> int | None:
        """Where the budget lies among whole-process peaks: above what the process holds without the model."""
        return None if self.budget_bytes is None else self.budget_bytes + self.steps[-1].process_bytes

    def are_gradients_equal(self, step: StepRecord) -> bool | None:
        """Whether a way of running gave the first way's gradients, bit for bit; None: they were not compared."""
        first = self.steps[0]
        return step.gradients == first.gradients if step.gradients and first.gradients else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        save_record(self, path, schema=SCHEMA)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RunRecord:
        """Read what :meth:`save` wrote."""
        return load_record(cls, path, schema=SCHEMA, older={"hyper_parallel.run/1": _run_from_schema_1})


def shown_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


# ---------------------------------------------------------------------- schema 1

_FATES_OF_SCHEMA_1: Final = {"saved": "save", "swapped": "swap", "recomputed": "recompute", "kept": "save"}


def _run_from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a run of schema 1 as schema 2 has it; what is malformed is left for the reader to refuse."""
    steps = data.get("steps")
    if isinstance(steps, list):
        data["steps"] = [_step_from_schema_1(step) if isinstance(step, dict) else step for step in steps]
    return data


def _step_from_schema_1(data: dict[str, Any]) -> dict[str, Any]:
    """The same for one step."""
    forecast = data.pop("forecast", None)
    if isinstance(forecast, dict):
        forecast.pop("budget_bytes", None)  # the run has it
    if forecast is not None:
        data["predicted"] = forecast
    fates = data.get("fates")
    for total in fates if isinstance(fates, list) else ():
        if isinstance(total, dict) and isinstance(total.get("fate"), str):
            if total["fate"] == "saved":
                total.pop("reason", None)  # it was always "policy"
            total["fate"] = _FATES_OF_SCHEMA_1.get(total["fate"], total["fate"])
    return data
