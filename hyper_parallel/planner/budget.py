"""A memory budget: one number of bytes, from what a person writes."""

from __future__ import annotations

from hyper_parallel.config import parse_bytes, show_bytes

__all__ = ["parse_budget", "show_setting"]


def parse_budget(budget: int | str, *, name: str = "budget") -> int:
    """``"20GiB"``, ``"500 MB"`` or bytes; anything that is no amount of memory is refused."""
    try:
        nbytes = parse_bytes(budget, name=name)
    except OverflowError:
        raise ValueError(
            f"{name}: {str(budget)[:40]!r}... is more than any machine has; write it like '20GiB'"
        ) from None
    if nbytes == 0:
        raise ValueError(f"{name}: {budget!r} is no memory at all; give the bytes the step may use, such as '20GiB'")
    return nbytes


def show_setting(name: str, value: object) -> str:
    """A setting for a person: its name says whether a number is bytes."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, int) and name.endswith(("_bytes", "_limit")):
        return show_bytes(value)
    return str(value)
