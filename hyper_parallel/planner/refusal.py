"""The refusal of a budget after trials: the smallest peak, measured or predicted, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.peak_parts import parts_with_base, shown_parts
from hyper_parallel.planner.profile import Profile

__all__ = ["refused"]

Attempt = Mapping[str, Any]  # see PlanTrials.history


def refused(
    profile: Profile, budget: int, history: Sequence[Attempt], refusal: BudgetTooSmallError | None
) -> BudgetTooSmallError:
    """``refusal``: of the search, which found nothing; None: plans were measured, and none kept the budget."""
    simple = [attempt for attempt in history if "way" in attempt]
    planned = [attempt for attempt in history if "way" not in attempt]
    measured = "".join(f"; {attempt['way']}: {_measured(attempt)}" for attempt in simple)
    if refusal is not None and not planned:
        return _nothing_planned(profile, budget, simple, refusal, measured)
    peaks = ", ".join(_measured(attempt) for attempt in planned)
    lowest = min(int(attempt["measured_peak_bytes"]) for attempt in history)
    missed = f"at least {show_bytes(lowest - budget)} too many"
    if lowest <= budget:
        missed = "and the allocator had to give back memory and ask again in every plan that was within it"
    error = BudgetTooSmallError(
        f"fit_memory: {show_bytes(budget)} was not kept in {len(planned)} attempts; measured were {peaks}{measured}, "
        f"{missed}. Raise the budget, allow more attempts, or shorten the sequence."
    )
    error.smallest_peak_bytes = lowest
    return error


def _measured(attempt: Attempt) -> str:
    retries = int(attempt.get("retries", 0))
    return f"{attempt['measured_peak']} ({retries} allocator retries)" if retries else str(attempt["measured_peak"])


def _nothing_planned(
    profile: Profile, budget: int, simple: Sequence[Attempt], refusal: BudgetTooSmallError, measured: str
) -> BudgetTooSmallError:
    least = min(simple, key=lambda attempt: int(attempt["measured_peak_bytes"]), default=None)
    predicted = refusal.smallest_peak_bytes
    if least is None or (predicted is not None and predicted <= least["measured_peak_bytes"]):
        error = BudgetTooSmallError(f"{refusal}{' Measured' + measured + '.' if measured else ''}")
        error.smallest_peak_bytes = predicted
        return error
    peak, base = int(least["measured_peak_bytes"]), profile.base.total
    parts = (
        {"base": base, "activations": peak - base} if peak >= base else {"base": base, "less than that": peak - base}
    )
    whole, made_of = shown_parts(peak, parts_with_base(profile, parts))
    error = BudgetTooSmallError(
        f"fit_memory: {show_bytes(budget)} cannot hold this step; the smallest peak found is {whole}, measured with "
        f"{least['way']} ({made_of}). Raise the budget, or shorten the sequence or the batch."
    )
    error.smallest_peak_bytes = peak
    return error
