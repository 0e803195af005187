"""The figure as a PNG, for slides and word processors. Drawn by resvg, one wheel without system libraries: an extra."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import MissingPackageError
from hyper_parallel.records.run_record import RunRecord
from hyper_parallel.report.figure import FONTS, render_figure

__all__ = ["write_bitmap"]

_SCALE: Final = 2  # 1520 dots across: 220 an inch in a column of seven inches
_PROBE: Final = f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONTS}">%s</svg>'


def write_bitmap(path: str | Path, run: RunRecord, *, timeline_of: str | None = None) -> None:
    """Write the figure of :func:`~hyper_parallel.report.figure.write_figure` as a PNG of twice its size.

    Raises:
        MissingPackageError: resvg is not installed, or there is no font to write with.
    """
    draw = _drawing()
    Path(path).write_bytes(draw(svg_string=render_figure(run, timeline_of=timeline_of), zoom=_SCALE))


@functools.cache
def _drawing() -> Any:  # resvg_py.svg_to_bytes
    try:
        draw = importlib.import_module("resvg_py").svg_to_bytes
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "figure: cannot draw a PNG without the package 'resvg_py', because it is not installed here. Install it: "
            "pip install resvg_py; or take the SVG, which needs nothing"
        ) from error
    if draw(svg_string=_PROBE % '<text y="16">H</text>') == draw(svg_string=_PROBE % ""):
        raise MissingPackageError(
            f"figure: cannot draw a PNG, because none of the fonts {FONTS} is installed here and its words would be "
            "missing. Install one (Debian: apt install fonts-dejavu-core), or take the SVG, whose reader has its own"
        )
    return draw
