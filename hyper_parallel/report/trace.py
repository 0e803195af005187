"""A timeline as Chrome and Perfetto read it: one track per kind of work, bytes on hover."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["TraceSpan", "chrome_trace", "write_chrome_trace"]


class TraceSpan(Protocol):
    """Anything with a track, two moments in microseconds and a size."""

    @property
    def track(self) -> str:
        """The line it is drawn on."""

    @property
    def start_us(self) -> float:
        """When it began."""

    @property
    def end_us(self) -> float:
        """When it ended."""

    @property
    def nbytes(self) -> int:
        """How many bytes it moved; 0 for none."""


def chrome_trace(spans: Iterable[TraceSpan], *, title: str = "hyper_parallel") -> dict[str, Any]:
    """The trace as plain data."""
    spans = list(spans)
    tracks = {name: number for number, name in enumerate(sorted({span.track for span in spans}))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for name, number in tracks.items():
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}})
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.track],
                "name": f"{span.track} {span.nbytes / 2**20:.0f} MiB" if span.nbytes else span.track,
                "ts": span.start_us,
                "dur": max(0.0, span.end_us - span.start_us),
                "args": {"bytes": span.nbytes},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: str | Path, spans: Iterable[TraceSpan], *, title: str = "hyper_parallel") -> None:
    """Write it; open the file in ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(chrome_trace(spans, title=title)))
