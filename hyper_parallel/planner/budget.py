"""A memory budget: one number of bytes, from what a person writes.

A budget is the peak of active device bytes of this process: weights, gradients, optimizer states, the batch and
activations together. A share (``"90%"``, ``"auto"``) is therefore a share of everything that the device can give to this
process, and nothing is subtracted for weights: they are inside the budget.

What a device can give (:class:`DeviceMemory`) is what the driver reports as free, and what this process's allocator
already holds. Memory of other processes, and of this process outside the allocator (the driver's context, communication
buffers), is in neither of them, so it is not counted.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Final, Protocol

from hyper_parallel.config import parse_bytes, show_bytes
from hyper_parallel.errors import PlanError
from hyper_parallel.records.record_files import require

__all__ = [
    "AUTO",
    "AUTO_PERCENT",
    "DeviceMemory",
    "agreed_budget",
    "check_budget",
    "is_share",
    "parse_budget",
    "show_setting",
]

AUTO: Final = "auto"
AUTO_PERCENT: Final = 90.0
"""``"auto"`` is this share, less the optimizer states that do not exist yet. The rest is the reserve for fragmentation:
torch's allocator reserves more than is active, and it retries and slows down where nothing is left."""
_EXAMPLES: Final = "'20GiB', '500MB', a number of bytes, 'auto', or a share of the device such as '90%'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What a device can give to this process, when it was asked."""

    device: str  # its name
    available_bytes: int | None = None  # free, and held by this process's allocator; None: nothing limits it
    expected_state_bytes: int = 0  # optimizer states that the first optimizer step will make

    def __post_init__(self) -> None:
        require(
            self.available_bytes is None or self.available_bytes >= 0,
            f"DeviceMemory.available_bytes: {self.available_bytes} is negative",
        )
        require(
            self.expected_state_bytes >= 0,
            f"DeviceMemory.expected_state_bytes: {self.expected_state_bytes} is negative",
        )


class Ranks(Protocol):
    """The ranks of a distributed run (see ``planner.fit.World``)."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on every rank."""


def parse_budget(
    budget: int | str, *, name: str = "budget", memory: Callable[[], DeviceMemory | None] | None = None
) -> int:
    """Bytes from ``"20GiB"``, ``"500 MB"``, a number of bytes, ``"90%"`` or ``"auto"``.

    Args:
        budget: what a person wrote.
        name: the setting that an error names.
        memory: says what the device can give; called for a share only. None: a share cannot be read here.

    Raises:
        ValueError, TypeError: no amount of memory.
        PlanError: a share, where nothing says how much memory there is.
    """
    percent = _percent(budget, name)
    if percent is not None:
        return _share(budget, percent, name, None if memory is None else memory())
    try:
        nbytes = parse_bytes(budget, name=name)
    except OverflowError:
        raise ValueError(
            f"{name}: {str(budget)[:40]!r}... is more than any machine has; write it like '20GiB'"
        ) from None
    except ValueError as error:
        if isinstance(budget, int) or "negative" in str(error):
            raise
        raise ValueError(f"{error}; a budget is {_EXAMPLES}") from None
    if nbytes == 0:
        raise ValueError(f"{name}: {budget!r} is no memory at all; give the bytes the step may use, such as '20GiB'")
    return nbytes


def check_budget(budget: int | str, *, name: str = "budget") -> None:
    """Refuse what is no budget, before anything is measured; a share is read when the device is known."""
    if _percent(budget, name) is None:  # also refuses a percentage out of range
        parse_budget(budget, name=name)


def is_share(budget: int | str) -> bool:
    """Whether a budget is a share of the device, and no amount."""
    return _percent(budget, "budget") is not None


def agreed_budget(budget: int | str, memory: Callable[[], DeviceMemory], ranks: Ranks | None) -> int:
    """The bytes of a budget; in a distributed run the smallest of all ranks, which then have the same."""
    if ranks is None:
        return parse_budget(budget, memory=memory)
    failure: Exception | None = None
    nbytes = 0
    try:
        nbytes = parse_budget(budget, memory=memory)
    except Exception as error:  # the other ranks wait for this rank's number
        failure = error
    rows = ranks.gather((nbytes, None if failure is None else f"{type(failure).__name__}: {failure}"))
    if failure is not None:
        raise failure
    for rank, (_, text) in enumerate(rows):
        if text is not None:
            raise PlanError(f"fit_memory: rank {rank} failed, so this one stops too: {text}")
    return int(min(row for row, _ in rows))


def _percent(budget: int | str, name: str) -> float | None:
    """The percentage of a share; None for an amount."""
    if not isinstance(budget, str):
        return None
    text = budget.strip()
    if text.lower() == AUTO:
        return AUTO_PERCENT
    if not text.endswith("%"):
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*%", text)
    if match is None:
        raise ValueError(f"{name}: cannot read {budget!r} as a share; a budget is {_EXAMPLES}")
    percent = float(match.group(1))
    if not 0 < percent <= 100:
        raise ValueError(
            f"{name}: {budget!r} is no share of the device; a percentage is above 0 and up to 100, such as '90%'"
        )
    return percent


def _share(budget: int | str, percent: float, name: str, memory: DeviceMemory | None) -> int:
    if memory is None:
        raise PlanError(
            f"{name}: {budget!r} is a share of a device's memory, and nothing here says how much there is (a profile of an "
            "earlier version does not). Profile again with this version, or give bytes, such as '20GiB'."
        )
    if memory.available_bytes is None:
        raise PlanError(
            f"{name}: {budget!r} is a share of a device's memory, and {memory.device} has no limit to its memory. Give bytes, "
            "such as '20GiB'; for the simulated accelerator: simulated_accelerator(capacity_bytes=...)."
        )
    nbytes = int(memory.available_bytes * percent / 100)
    if str(budget).strip().lower() == AUTO:
        nbytes -= memory.expected_state_bytes
    if nbytes <= 0:
        expected = memory.expected_state_bytes
        states = f", and optimizer states of {show_bytes(expected)} are still to come" if expected else ""
        raise PlanError(
            f"{name}: {budget!r} leaves no memory: {memory.device} can give {show_bytes(memory.available_bytes)} to this "
            f"process{states}. End what else uses the device, shard the model, or give bytes, such as '20GiB'."
        )
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
