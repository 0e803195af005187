"""The link to far memory where several ranks of one host copy at once.

Ranks of one host share its memory and often the lanes to their devices, so a rate that one of them measured alone is more
than each gets in a step, in which all copy. Every rank copies alone first, in turn, and then all copy at the same time, in
each direction. A plan is made with the second figure; the first one is kept beside it for people.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from hyper_parallel.core.processes import Process
from hyper_parallel.planner.profile import Link
from hyper_parallel.planner.ranks import World, together

__all__ = ["LinkProbe", "Rates", "measured_together", "with_shared_rates"]


class LinkProbe(Protocol):
    """Copies of our own between the device and far memory."""

    def bytes_per_second(self, *, goes_out: bool, is_shared: bool) -> float:
        """The rate in one direction. ``is_shared``: others copy too, so copy for long enough that all copies overlap."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of one rank, alone and with all ranks of its host copying."""

    ranks: int  # of this host
    lone_out: float
    lone_in: float
    shared_out: float
    shared_in: float


def measured_together(world: World, probe: LinkProbe) -> Rates | None:
    """All ranks call it at the same time. None where no host has two ranks.

    Each round ends when every rank has come to its end, so what is copied in one round does not reach into another.
    """
    hosts = [process.host for process in together(world, Process.current)]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    turns = max(hosts.count(host) for host in set(hosts))
    if turns == 1:
        return None
    lone = (0.0, 0.0)
    for turn in range(turns):
        is_mine = here.index(world.rank) == turn
        rows = together(world, lambda: _both_ways(probe) if is_mine else None)  # noqa: B023  # runs within this turn
        lone = rows[world.rank] or lone
    shared = [
        together(world, lambda: probe.bytes_per_second(goes_out=goes_out, is_shared=True))[world.rank]  # noqa: B023
        for goes_out in (True, False)
    ]
    return Rates(ranks=len(here), lone_out=lone[0], lone_in=lone[1], shared_out=shared[0], shared_in=shared[1])


def _both_ways(probe: LinkProbe) -> tuple[float, float]:
    return (
        probe.bytes_per_second(goes_out=True, is_shared=False),
        probe.bytes_per_second(goes_out=False, is_shared=False),
    )


def with_shared_rates(link: Link, rates: Rates) -> Link:
    """The link as a plan may count on it. Copies of the step itself may have been slower still: then that is the rate."""
    return dataclasses.replace(
        link,
        out_bytes_per_second=min(link.out_bytes_per_second, rates.shared_out),
        in_bytes_per_second=min(link.in_bytes_per_second, rates.shared_in),
        lone_out_bytes_per_second=rates.lone_out,
        lone_in_bytes_per_second=rates.lone_in,
        copying_ranks=rates.ranks,
    )
