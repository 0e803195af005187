"""A run as one HTML file that needs nothing else: no network, no library, no server.

Names come from a model, and a model is a file from elsewhere. They reach the page as escaped text, or inside a JSON block
whose angle brackets and ampersands are written as escapes; the script writes them with ``textContent`` only, and the page's
own policy forbids every request.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import show_bytes
from hyper_parallel.fates import Fate
from hyper_parallel.records.run_record import FateTotal, OpTotal, RunRecord, StepRecord, shown_names
from hyper_parallel.report.words import show_peak_change, show_seconds, show_time, show_time_change

__all__ = ["render_page", "write_page"]

_NEXT_TO_NOTHING = 0.01  # a share of a prediction that was about nothing says nothing
_FATE_WORDS: Final = {Fate.SAVE: "saved", Fate.SWAP: "swapped", Fate.RECOMPUTE: "recomputed"}
_FILLED_IN = re.compile(r"\{\{(\w+)\}\}")


def write_page(path: str | Path, run: RunRecord) -> None:
    """Write the page."""
    Path(path).write_text(render_page(run), encoding="utf-8")


def render_page(run: RunRecord) -> str:
    """The page as text."""
    versions = run.versions
    subtitle = f"{versions.device} · {versions.framework} {versions.framework_version} · {run.created}".rstrip(" ·")
    parts = {
        "title": _text(run.title),
        "subtitle": _text(subtitle),
        "css": _asset("report.css"),
        "script": _asset("report.js"),
        "run": _embedded(run),
        "comparison": _comparison(run),
        "memory_kind": _text(run.memory_kind[:1].upper() + run.memory_kind[1:]),
        "peaks": _peaks(run),
        "fates": _fates(run),
        "ops": _ops(run),
        "regions": _regions(run),
        "predicted": _predicted(run),
        "configuration": _configuration(run),
        "notes": _notes(run),
        "version": _text(versions.library_version),
    }
    # One pass over the template: what was filled in is never read again.
    return _FILLED_IN.sub(lambda found: parts[found.group(1)], _asset("page.html"))


def _asset(name: str) -> str:
    return importlib.resources.files("hyper_parallel.report").joinpath("assets", name).read_text(encoding="utf-8")


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _embedded(run: RunRecord) -> str:
    data: dict[str, Any] = {
        "steps": [
            {
                "name": step.name,
                "peak_where": step.peak_where,
                "peak_parts": dict(step.peak_parts),
                "memory": {"times_us": list(step.memory.times_us), "nbytes": list(step.memory.nbytes)},
                "spans": [
                    {
                        "track": span.track.value,
                        "name": span.name,
                        "start_us": span.start_us,
                        "end_us": span.end_us,
                        "nbytes": span.nbytes,
                    }
                    for span in step.spans
                ],
                "fates": [
                    {"fate": _fate_word(total), "reason": _reason_word(total), "nbytes": total.nbytes}
                    for total in step.fates
                ],
                "ops": [_op(op) for op in step.ops],
            }
            for step in run.steps
        ],
        "budget_line": run.budget_line_bytes,
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII, so no line separator can end a string
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _fate_word(total: FateTotal) -> str:
    """The column and colour of a fate: a value that stayed for a reason of the engine's is told from one that was saved."""
    return "kept" if total.fate is Fate.SAVE and total.reason else _FATE_WORDS[total.fate]


def _reason_word(total: FateTotal) -> str:
    return "policy" if total.fate is Fate.SAVE and not total.reason else total.reason


def _op(op: OpTotal) -> dict[str, Any]:
    names = ("op", "count", "saved_bytes", "recomputed_bytes", "swapped_bytes", "kept_bytes", "reason")
    return {name: getattr(op, name) for name in names}


# ---------------------------------------------------------------------- tables


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (), kind: str = "") -> str:
    """Cells are markup already; a column of ``words`` is read from the left. On a phone a cell shows the head of its column."""

    def cell(tag: str, at: int, value: str) -> str:
        head = f' data-head="{_text(heads[at])}"' if tag == "td" and heads else ""
        return f"<{tag}{' class=words' if at in words else ''}{head}>{value}</{tag}>"

    head = "".join(cell("th", at, _text(name)) for at, name in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", at, value) for at, value in enumerate(row)) + "</tr>" for row in rows)
    return f'<table class="{kind}">{f"<thead><tr>{head}</tr></thead>" if heads else ""}<tbody>{body}</tbody></table>'


def _comparison(run: RunRecord) -> str:
    first = run.steps[0]
    rows = []
    for step in run.steps:
        change = "" if step is first else show_peak_change(step, first)
        slower = "" if step is first else show_time_change(step, first)
        what = f"<br><code>{_text(step.what)}</code>" if step.what else ""
        rows.append(
            [
                f"<strong>{_text(step.name)}</strong>{what}",
                show_bytes(step.peak_bytes),
                change,
                show_time(step),
                slower,
                f"{show_bytes(step.out_bytes)} / {show_bytes(step.back_bytes)}" if step.out_bytes else "–",
                show_seconds(step.exposed_seconds) if step.out_bytes else "–",
                _gradients(run, step),
            ]
        )
    heads = ("way", "peak", "peak ±", "step", "step ±", "moved out / back", "waited for copies", "gradients")
    has_spread = any(step.spread_seconds for step in run.steps)
    note = (
        "Times are medians of steps that the ways ran in turns, with half the range. "
        "“same”: the ranges overlap, so no difference was measured."
    )
    return _table(heads, rows) + (f'<p class="soft small">{note}</p>' if has_spread else "")


def _gradients(run: RunRecord, step: StepRecord) -> str:
    are_equal = run.are_gradients_equal(step)
    if are_equal is None:
        return "not compared"
    if step is run.steps[0]:
        return "reference"
    return '<span class="good">bitwise equal</span>' if are_equal else '<span class="bad">DIFFERENT</span>'


def _peaks(run: RunRecord) -> str:
    lines = [
        f"<strong>{_text(step.name)}</strong>: {show_bytes(step.peak_bytes)}, at the {_text(step.peak_where)}"
        for step in run.steps
        if step.peak_where
    ]
    return f'<p class="small">{"<br>".join(lines)}</p>' if lines else ""


def _fates(run: RunRecord) -> str:
    rows = [
        [
            _text(step.name),
            _text(_fate_word(total)),
            _text(_reason_word(total).replace("_", " ")),
            show_bytes(total.nbytes),
        ]
        for step in run.steps
        for total in step.fates
    ]
    return _table(("way", "fate", "because", "bytes per step"), rows, words=(1, 2)) if rows else ""


def _ops(run: RunRecord) -> str:
    tables = []
    for step in run.steps:
        if step.ops:
            rows = [
                [
                    _text(f"{op.op} × {op.count}"),
                    *(
                        show_bytes(nbytes) if nbytes else "–"
                        for nbytes in (op.saved_bytes, op.swapped_bytes, op.recomputed_bytes, op.kept_bytes)
                    ),
                    _text(op.reason),
                ]
                for op in step.ops
            ]
            heads = ("op", "saved", "swapped", "recomputed", "kept", "because")
            tables.append(_table(heads, rows, words=(5,), kind="small"))
    return "".join(tables)


def _regions(run: RunRecord) -> str:
    rows = [
        [
            _text(step.name),
            str(total.count),
            "runs Python again" if total.reason else "from a tape",
            _text(total.reason),
            _text(shown_names(total.names)),
        ]
        for step in run.steps
        for total in step.regions
    ]
    if not rows:
        return ""
    note = "From a tape backward runs the recorded ops that it needs. Otherwise the region's Python runs a second time."
    table = _table(("way", "regions", "made again", "because", "which"), rows, words=(2, 3, 4))
    return f'<section><h2>Recomputed regions</h2><p class="soft small">{note}</p>{table}</section>'


def _predicted(run: RunRecord) -> str:
    rows: list[list[str]] = []
    for step in run.steps:
        prediction = step.predicted
        if prediction is None:
            continue
        compared: tuple[tuple[str, Callable[[Any], str], float, float], ...] = (
            ("peak", show_bytes, prediction.peak_bytes, step.model_peak_bytes),
            ("step", show_seconds, prediction.step_seconds, step.step_seconds),
            ("moved out", show_bytes, prediction.swapped_out_bytes, step.out_bytes),
            ("waited for copies", show_seconds, prediction.exposed_seconds, step.exposed_seconds),
        )
        for what, shown, predicted, measured in compared:
            rows.append([_text(step.name), what, shown(predicted), shown(measured), _off(predicted, measured)])
    if not rows:
        return ""
    note = "Peaks are of the model's own memory: what the process holds without it is left out."
    words = f'<p class="soft small">{note}</p>' if any(step.process_bytes for step in run.steps) else ""
    table = _table(("way", "what", "predicted", "measured", "off by"), rows, words=(1,))
    return f"<section><h2>Predicted against measured</h2>{words}{table}</section>"


def _off(predicted: float, measured: float) -> str:
    return f"{measured / predicted - 1:+.1%}" if predicted > _NEXT_TO_NOTHING * measured else "–"


def _configuration(run: RunRecord) -> str:
    versions = run.versions
    pairs = {
        "device": versions.device,
        versions.framework: versions.framework_version,
        "hyper_parallel": versions.library_version,
        "python": versions.python_version,
        **({} if run.budget_bytes is None else {"budget": show_bytes(run.budget_bytes)}),
        **run.machine,
        **run.settings,
    }
    return _table((), [[_text(name), _text(value)] for name, value in pairs.items()], kind="pairs")


def _notes(run: RunRecord) -> str:
    lines = list(dict.fromkeys([*run.notes, *(note for step in run.steps for note in step.notes)]))
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if items else ""
