"""The ranks of a distributed fit: all do the same, and where one fails all stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hyper_parallel.errors import LostRankError, PlanError
from hyper_parallel.planner.profile import Profile

__all__ = ["OneProcess", "World", "together", "worst_of"]

Result = TypeVar("Result")


class World(Protocol):
    """The ranks of a distributed run."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on every rank.

        Raises:
            LostRankError: a rank has ended, or did not come in time; names it.
        """


class OneProcess:
    """A run of one process."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """See :class:`World`."""
        return [value]


def together(world: World, work: Callable[[], Result]) -> list[Result]:
    """The result of every rank; where one failed, all raise."""
    result: Result | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # the other ranks wait for this rank's result
        failure = error
    try:
        rows = world.gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
    except LostRankError as lost:
        if failure is not None:
            raise lost from failure  # a rank that ends in the middle of a step breaks the steps of the others
        raise
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, (_, text) in enumerate(rows) if text is not None]
    if failed:
        raise PlanError(f"fit_memory: rank {failed[0][0]} failed, so this one stops too: {failed[0][1]}")
    return [row for row, _ in rows]


def worst_of(profiles: Sequence[Profile]) -> Profile:
    """One profile for all ranks: the one with the highest peak, with the slowest link and step and the least far memory."""
    prints = {profile.model_fingerprint for profile in profiles}
    if len(prints) > 1:
        raise PlanError(
            f"fit_memory: the ranks hold {len(prints)} different models ({', '.join(sorted(prints))}), and one plan cannot serve "
            "them. Profile, plan and apply on each rank separately (profile_memory, plan_memory, apply_plan)."
        )
    worst = max(profiles, key=lambda profile: profile.base.total + profile.measured.peak_bytes)
    return dataclasses.replace(
        worst,
        link=dataclasses.replace(
            worst.link,
            out_bytes_per_second=min(profile.link.out_bytes_per_second for profile in profiles),
            in_bytes_per_second=min(profile.link.in_bytes_per_second for profile in profiles),
            lone_out_bytes_per_second=min(profile.link.lone_out_bytes_per_second for profile in profiles),
            lone_in_bytes_per_second=min(profile.link.lone_in_bytes_per_second for profile in profiles),
            copying_ranks=max(profile.link.copying_ranks for profile in profiles),
        ),
        far=dataclasses.replace(worst.far, host_bytes=min(profile.far.host_bytes for profile in profiles)),
        measured=dataclasses.replace(
            worst.measured,
            step_seconds=max(profile.measured.step_seconds for profile in profiles),
            peak_bytes=max(profile.measured.peak_bytes for profile in profiles),
        ),
    )
