"""A run as one SVG for papers: memory over the step, every way a line, and the timeline of one of them below."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from hyper_parallel.config import show_bytes
from hyper_parallel.records.run_record import RunRecord, StepRecord
from hyper_parallel.records.work_span import WorkSpan

__all__ = ["FONTS", "render_figure", "write_figure"]

FONTS: Final = "Helvetica, Arial, Liberation Sans, DejaVu Sans, Noto Sans, Roboto, sans-serif"
_WIDTH: Final = 760
_LEFT: Final = 78
_RIGHT: Final = 12
_TOP: Final = 34
_PLOT_HEIGHT: Final = 240
_LANE: Final = 15
_COLOURS: Final = ("#777777", "#d0711b", "#1f7a8c", "#6a4fb3", "#b03a6e", "#5b8c2a", "#2456a6", "#8c6d1f")
_PAINT: Final = {
    "forward": "#7aa6d6",
    "replay": "#dfa04e",
    "backward": "#8d7bc0",
    "stall": "#c8372d",
    "copy out": "#1f8a7a",
    "copy back": "#2f6fb5",
}


def write_figure(path: str | Path, run: RunRecord, *, timeline_of: str | None = None) -> None:
    """Write the figure; ``timeline_of`` names the way whose timeline is drawn, the last one by default."""
    Path(path).write_text(render_figure(run, timeline_of=timeline_of), encoding="utf-8")


def render_figure(run: RunRecord, *, timeline_of: str | None = None) -> str:
    """The figure as text."""
    known = [step.name for step in run.steps]
    if timeline_of is not None and timeline_of not in known:
        raise ValueError(f"figure: no way is called {timeline_of!r}; known are {', '.join(known)}")
    shown = run.steps[-1 if timeline_of is None else known.index(timeline_of)]
    longest = max([1.0, *(_last_us(step) for step in run.steps)])
    drawn = [*_memory(run, longest), *_legend(run)]
    tracks = [track for track in _PAINT if any(span.track.value == track for span in shown.spans)]
    height = _TOP + _PLOT_HEIGHT + 34
    drawn += _axis(longest, height - 34)
    for at, track in enumerate(tracks):
        spans = [span for span in shown.spans if span.track.value == track]
        drawn += _track(track, spans, longest, height + 10 + at * (_LANE + 5))
    height += len(tracks) * (_LANE + 5) + 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="{FONTS}" font-size="11">'
    )
    ground = f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(run.title)}</title>", ground, *drawn, "</svg>", ""])


def _last_us(step: StepRecord) -> float:
    return max([*(step.memory.times_us[-1:]), *(span.end_us for span in step.spans)], default=0.0)


def _x(at_us: float, longest_us: float) -> float:
    return _LEFT + at_us / longest_us * (_WIDTH - _LEFT - _RIGHT)


def _words(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#333333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _memory(run: RunRecord, longest: float) -> Iterator[str]:
    budget = run.budget_line_bytes
    top = 1.05 * max([1, budget or 0, *(value for step in run.steps for value in step.memory.nbytes)])
    bottom = _TOP + _PLOT_HEIGHT

    def y(nbytes: float) -> float:
        return bottom - nbytes / top * _PLOT_HEIGHT

    step = 2 ** max(0, math.ceil(math.log2(top / 8)))  # 4 to 8 lines, at round numbers of bytes
    for value in range(0, int(top) + 1, step):
        yield f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
        yield _words(_LEFT - 6, y(value) + 4, show_bytes(value), anchor="end")
    for at, step in enumerate(run.steps):
        points = " ".join(
            f"{_x(us, longest):.1f},{y(nbytes):.1f}" for us, nbytes in zip(step.memory.times_us, step.memory.nbytes)
        )
        if points:
            yield f'<polyline points="{points}" fill="none" stroke="{_COLOURS[at % 8]}" stroke-width="1.4"/>'
    if budget is not None:
        line = f'<path d="M{_LEFT} {y(budget):.1f}H{_WIDTH - _RIGHT}" stroke="#b3261e" stroke-dasharray="5 4"/>'
        yield line + _words(_WIDTH - _RIGHT, y(budget) - 4, "budget", anchor="end", colour="#b3261e")


def _legend(run: RunRecord) -> Iterator[str]:
    x = float(_LEFT)
    for at, step in enumerate(run.steps):
        label = f"{step.name} {show_bytes(step.peak_bytes)}"
        yield f'<rect x="{x:.1f}" y="12" width="10" height="10" rx="2" fill="{_COLOURS[at % 8]}"/>'
        yield _words(x + 14, 21, label)
        x += 30 + 6.2 * len(label)


def _axis(longest: float, y: float) -> Iterator[str]:
    tenth = 10 ** math.floor(math.log10(longest))
    step = next(tenth * part for part in (0.2, 0.5, 1, 2) if longest <= 6 * tenth * part)
    for tick in range(int(longest / step) + 1):
        at = tick * step
        anchor = "end" if at > 0.97 * longest else "middle"
        yield _words(_x(at, longest), y + 18, f"{at / 1e3:g} ms", anchor=anchor)


def _track(track: str, spans: Sequence[WorkSpan], longest: float, y: float) -> Iterator[str]:
    yield _words(_LEFT - 6, y + 11, track, anchor="end")
    for span in spans:
        x = _x(span.start_us, longest)
        width = max(0.6, _x(span.end_us, longest) - x - 0.3)
        box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_LANE}" fill={quoteattr(_PAINT[track])}'
        yield f"{box}><title>{escape(span.name or track)}</title></rect>"
