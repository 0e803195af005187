"""What a plan makes of a link that several ranks share, and of ops that run once."""

from __future__ import annotations

import dataclasses

import hyper_parallel as hp
from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import Choice, KindAnalysis, make_block_trace, replayed_ops
from hyper_parallel.planner.profile import BlockKind, Link, OpProfile, Profile
from hyper_parallel.planner.ranks import OneProcess, worst_of
from hyper_parallel.planner.shared_link import Rates, measured_together, with_shared_rates

from .small import small_profile

RATES = Rates(ranks=4, lone_out=8.0, lone_in=6.0, shared_out=2.0, shared_in=3.0)


class NoProbe:
    def bytes_per_second(self, *, goes_out: bool, is_shared: bool) -> float:
        raise AssertionError("one process copies with no other")


def test_one_process_measures_nothing() -> None:
    assert measured_together(OneProcess(), NoProbe()) is None


def test_a_plan_counts_on_the_slower_of_both_rates_and_shows_the_lone_one() -> None:
    link = with_shared_rates(Link(out_bytes_per_second=5.0, in_bytes_per_second=2.5), RATES)
    assert (link.out_bytes_per_second, link.in_bytes_per_second) == (2.0, 2.5)
    assert (link.lone_out_bytes_per_second, link.lone_in_bytes_per_second, link.copying_ranks) == (8.0, 6.0, 4)
    plan = hp.plan_memory(small_profile(link=link), "1MiB")
    assert (
        "with the 4 ranks of this host copying at once, the link gives each 2 B/s out and 2 B/s back; alone, 8 B/s and 6 B/s"
        in (plan.notes)
    )
    assert not hp.plan_memory(small_profile(), "1MiB").notes


def test_the_worst_rank_has_the_slowest_link() -> None:
    one = small_profile(link=with_shared_rates(Link(out_bytes_per_second=5.0, in_bytes_per_second=5.0), RATES))
    slower = dataclasses.replace(
        one, link=dataclasses.replace(one.link, lone_out_bytes_per_second=7.0, copying_ranks=2)
    )
    worst = worst_of([one, slower]).link
    assert (worst.lone_out_bytes_per_second, worst.lone_in_bytes_per_second, worst.copying_ranks) == (7.0, 6.0, 4)


def _with_collective(*, runs_once: bool) -> Profile:
    ops = (
        OpProfile(name="mm", seconds=1.0, output_bytes=4, kept_bytes=0, inputs=(-1,)),
        OpProfile(
            name="all_reduce", seconds=2.0, output_bytes=4, kept_bytes=4, inputs=(0,), kept_by=(2,), runs_once=runs_once
        ),
        OpProfile(name="gelu", seconds=1.0, output_bytes=4, kept_bytes=4, inputs=(1,), kept_by=(2,)),
    )
    return small_profile(kind=BlockKind(name="Block", ops=ops, backward_seconds=1.0))


def test_a_collective_is_kept_where_everything_is_recomputed() -> None:
    recomputed = Choice(0, (Fate.SAVE,), (Fate.RECOMPUTE,) * 3)
    kept = Choice(0, (Fate.SAVE,), (Fate.RECOMPUTE, Fate.SAVE, Fate.RECOMPUTE))
    for runs_once, choice in ((True, recomputed), (True, kept), (False, kept)):
        kind = _with_collective(runs_once=runs_once).kinds[0]
        trace = make_block_trace(KindAnalysis(kind), choice, input_bytes=3, min_bytes=1)
        assert trace.replay_seconds == 2.0, "mm and gelu"
    kinds = [_with_collective(runs_once=runs_once).kinds[0] for runs_once in (True, False)]
    assert [replayed_ops(kind) for kind in kinds] == [2, 3]


def test_the_plan_says_that_a_collective_is_saved() -> None:
    profile = _with_collective(runs_once=True)
    floor = profile.base.total + 12
    plans = [hp.plan_memory(profile, budget) for budget in range(floor, floor + 40, 4) if _fits(profile, budget)]
    decided = [
        op
        for plan in plans
        for recipe in plan.recipes
        for region in recipe.regions
        for op in region.ops
        if op.name == "all_reduce"
    ]
    assert decided
    assert all(op.fate is not Fate.RECOMPUTE for op in decided)
    assert all(op.reason == "a collective, which is never run again" for op in decided)


def _fits(profile: Profile, budget: int) -> bool:
    try:
        hp.plan_memory(profile, budget)
    except hp.HyperParallelError:
        return False
    return True
