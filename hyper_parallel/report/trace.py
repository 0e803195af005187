"""A timeline as Chrome and Perfetto read it: one track per kind of work, bytes on hover."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from hyper_parallel.records.run_record import RunRecord

__all__ = ["TraceSpan", "chrome_trace", "run_trace", "write_chrome_trace", "write_run_trace"]


class TraceSpan(Protocol):
    """Anything with a track, two moments in microseconds and a size."""

    @property
    def track(self) -> Any:
        """The line it is drawn on: a string, or a member of an enumeration of strings."""

    @property
    def start_us(self) -> float:
        """When it began."""

    @property
    def end_us(self) -> float:
        """When it ended."""

    @property
    def nbytes(self) -> int:
        """How many bytes it moved; 0 for none."""


def _events(spans: Iterable[TraceSpan], *, process: int, title: str) -> list[dict[str, Any]]:
    spans = list(spans)
    tracks = {name: number for number, name in enumerate(sorted({_track(span) for span in spans}))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}]
    for name, number in tracks.items():
        events.append({"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": name}})
    for span in spans:
        track = _track(span)
        name = getattr(span, "name", "") or track
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": tracks[track],
                "name": f"{name} {span.nbytes / 2**20:.0f} MiB" if span.nbytes else name,
                "ts": span.start_us,
                "dur": max(0.0, span.end_us - span.start_us),
                "args": {"bytes": span.nbytes},
            }
        )
    return events


def _track(span: TraceSpan) -> str:
    return str(span.track.value if isinstance(span.track, enum.Enum) else span.track)


def chrome_trace(spans: Iterable[TraceSpan], *, title: str = "hyper_parallel") -> dict[str, Any]:
    """The trace as plain data."""
    return {"traceEvents": _events(spans, process=0, title=title), "displayTimeUnit": "ms"}


def write_chrome_trace(path: str | Path, spans: Iterable[TraceSpan], *, title: str = "hyper_parallel") -> None:
    """Write it; open the file in ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(spans, title=title)))


def run_trace(run: RunRecord) -> dict[str, Any]:
    """Every way of a run as a process of its own, with its memory as a counter."""
    events: list[dict[str, Any]] = []
    for number, step in enumerate(run.steps):
        events += _events(step.spans, process=number, title=step.name)
        events += [
            {"ph": "C", "pid": number, "name": "memory", "ts": us, "args": {"bytes": nbytes}}
            for us, nbytes in zip(step.memory.times_us, step.memory.nbytes)
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": run.title}}


def write_run_trace(path: str | Path, run: RunRecord) -> None:
    """Write it; open the file in ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(run_trace(run)))
