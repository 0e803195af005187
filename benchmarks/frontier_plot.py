"""Time against memory as a picture: one panel per case, plain SVG, no library.

The ground is transparent, and every colour is readable on white and on black: a page shows the same file in both modes.
"""

from __future__ import annotations

import html
from typing import Any

from hyper_parallel.report.figure import FONTS

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 20, 40, 50
INK, GRID, OURS, OTHERS = "#7b828a", "#80808055", "#1f9d55", "#d9534f"
SLOWEST = 1.5  # what is slower than this would press everything else to the bottom


def frontier_svg(results: list[dict[str, Any]]) -> str:
    """All panels, one below the other; a case in which all of ours are off the scale has a table, and no panel."""
    results = [
        result
        for result in results
        if any(name.startswith("ours") and row.get("ratio", SLOWEST) < SLOWEST for name, row in result["modes"].items())
    ]
    panels = [_panel(result, TOP + index * (HEIGHT + 20)) for index, result in enumerate(results)]
    height = len(results) * (HEIGHT + 20) + TOP
    style = f'font-family="{FONTS}" font-size="11" fill="{INK}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" {style}>'
    return "\n".join([head, *panels, "</svg>"])


def _legend(top: int) -> list[str]:
    """What the two colours mean."""
    parts = []
    for x, color, words in ((470, OURS, "hyper_parallel"), (600, OTHERS, "others, and the plain step")):
        parts.append(f'<circle cx="{x}" cy="{top - 14}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 9}" y="{top - 10}">{words}</text>')
    return parts


def _panel(result: dict[str, Any], top: int) -> str:
    rows = {name: row for name, row in result["modes"].items() if "error" not in row and row["ratio"] < SLOWEST}
    most_act = max(row["act_gib"] for row in rows.values()) * 1.05
    most_ratio = max(1.3, *(row["ratio"] for row in rows.values())) * 1.01
    least_ratio = 0.98

    def x(act: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * act / most_act

    def y(ratio: float) -> float:
        return top + (HEIGHT - BOTTOM) * (1 - (ratio - least_ratio) / (most_ratio - least_ratio))

    parts = [
        f'<text x="{LEFT}" y="{top - 10}" font-size="14">{html.escape(result["case"]["name"])}</text>',
        *_legend(top),
    ]
    for step in range(100, int(most_ratio * 100) + 1, 5):
        ratio = step / 100
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" stroke="{GRID}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:.2f}</text>')
    for gib in range(0, int(most_act) + 1, 5):
        parts.append(f'<text x="{x(gib):.1f}" y="{top + HEIGHT - BOTTOM + 16}" text-anchor="middle">{gib}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{top + HEIGHT - 14}" text-anchor="middle">activation memory, GiB</text>')
    parts.append(f'<text x="14" y="{top + 140}" transform="rotate(-90 14 {top + 140})">step time, ratio to none</text>')
    # Where labels stand already, by their left edge; a dot is as wide as a few letters.
    taken = [(x(row["act_gib"]) - 4, 8.0, y(row["ratio"]) + 3) for row in rows.values()]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["act_gib"]):
        color = OURS if name.startswith("ours") else OTHERS
        parts.append(f'<circle cx="{x(row["act_gib"]):.1f}" cy="{y(row["ratio"]):.1f}" r="4" fill="{color}"/>')
        anchor = "end" if row["act_gib"] > 0.8 * most_act else "start"
        shift = -7 if anchor == "end" else 7
        label = f"{html.escape(name)} ({row['ratio']:.3f}, {row['act_gib']:.1f})"
        width = 5.2 * len(label)
        left = x(row["act_gib"]) + shift - (width if anchor == "end" else 0)
        label_y = _free_row(left, width, y(row["ratio"]) + 3, taken)
        taken.append((left, width, label_y))
        parts.append(
            f'<text x="{x(row["act_gib"]) + shift:.1f}" y="{label_y:.1f}" text-anchor="{anchor}" '
            f'fill="{color}" font-size="9">{label}</text>'
        )
    return "\n".join(parts)


def _free_row(left: float, width: float, wanted: float, taken: list[tuple[float, float, float]]) -> float:
    """The row nearest to ``wanted`` on which a label covers nothing; above before below."""
    for away in range(20):
        for row in (wanted - 9 * away, wanted + 9 * away):
            if all(
                abs(row - other) >= 9 or left + width <= at or at + other_width <= left
                for at, other_width, other in taken
            ):
                return row
    return wanted
