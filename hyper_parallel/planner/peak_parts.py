"""A peak of memory and its parts, in words whose numbers add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from hyper_parallel.planner.profile import BaseBytes, Profile

__all__ = ["parts_with_base", "shown_parts"]

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_BASE: Final = "base"


def parts_with_base(profile: Profile, parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of a peak with what is there anyway (``"base"``) by its own parts."""
    base = {field.name: getattr(profile.base, field.name) for field in dataclasses.fields(BaseBytes)}
    rest = {name: nbytes for name, nbytes in parts.items() if name != _BASE}
    # Gradients that exist before the step are called as those are that the step makes.
    whole = {name: nbytes + rest.pop(name, 0) for name, nbytes in base.items()} | rest
    return {name: nbytes for name, nbytes in whole.items() if nbytes}


def shown_parts(whole: int, parts: Mapping[str, int]) -> tuple[str, str]:
    """The whole, and its parts in a row, all in one unit: the parts that are written add up to the whole that is written.

    Each part is rounded up or down by less than a hundredth of the unit. What is written as 0 is left out.
    """
    assert sum(parts.values()) == whole, f"the parts {dict(parts)} make up {sum(parts.values())}, not {whole}"
    power = 0
    while power + 1 < len(_UNITS) and abs(whole) >= 1024 ** (power + 1):
        power += 1
    places = 100 if power else 1
    exact = {name: nbytes * places / 1024**power for name, nbytes in parts.items()}
    shown = {name: int(size // 1) for name, size in exact.items()}
    missing = round(whole * places / 1024**power) - sum(shown.values())
    for name in sorted(exact, key=lambda name: shown[name] - exact[name])[:missing]:
        shown[name] += 1

    def text(size: int) -> str:
        return f"{size / places:.2f} {_UNITS[power]}" if power else f"{size} B"

    words = ", ".join(f"{name} {text(size)}" for name, size in shown.items() if size)
    return text(round(whole * places / 1024**power)), words
