"""Compiled blocks: no answer needs more graphs than it may, and the search is good within that limit.

Judged against every possible answer, on instances small enough to try them all.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from test_planner_brute_force import UNIT, random_kind, random_profile

from hyper_parallel.fates import Fate
from hyper_parallel.planner import graph_limit
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.graph_limit import MOST_GRAPHS, GraphLimit, graph_of
from hyper_parallel.planner.profile import Block, CompiledGraph, EngineSettings, FarCaps, Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator

BLOCKS, OPS = 4, 3
TOLERANCE = 1.03


def compiled_profile(seed: int, *, swaps: bool = False) -> Profile:
    """Blocks of one kind, more of them than there may be graphs; without swaps there are few enough ways."""
    dice = random.Random(f"graphs {seed}")
    kind = random_kind(dice, OPS, is_cut=False)
    kept = [at for at, op in enumerate(kind.ops) if op.kept_bytes]
    kind = dataclasses.replace(
        kind,
        runs_from_tape=True,
        graph=CompiledGraph(
            saves=tuple(at for at in kept if dice.random() < 0.7),
            other_bytes=dice.randint(0, 2) * UNIT,
            forward_share=dice.random(),
            replay_share=dice.random(),
        ),
    )
    return dataclasses.replace(
        random_profile(seed),
        kinds=(kind,),
        blocks=tuple(Block(name=f"blocks.{at}", kind=0, input_bytes=2 * UNIT) for at in range(BLOCKS)),
        engine=EngineSettings(min_bytes=1 if swaps else 10**6, is_tunable=False),
        far=FarCaps(host_bytes=10**9),
    )


def graphs_in(choices: tuple[Choice, ...]) -> int:
    return len({graph_of(choice) for choice in choices})


def everything(profile: Profile) -> list[tuple[int, float, int]]:
    """Peak, time and number of graphs of every answer without a swap."""
    simulator = StepSimulator(profile)
    fates = itertools.product((Fate.SAVE, Fate.RECOMPUTE), repeat=OPS)
    options = [LEFT_ALONE, *(Choice(0, (Fate.SAVE,), each) for each in fates)]
    found = []
    for choices in itertools.product(options, repeat=BLOCKS):
        step = simulator.simulate(choices, profile.engine)
        found.append((step.peak_bytes, step.step_seconds, graphs_in(choices)))
    return found


@pytest.mark.parametrize(("seed", "most"), [(seed, most) for seed in range(8) for most in (1, 2, MOST_GRAPHS)])
def test_the_search_is_near_the_best_answer_within_the_limit(
    seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks of three ops seldom want more than two graphs, so tighter limits are tried as well."""
    monkeypatch.setattr(graph_limit, "MOST_GRAPHS", most)
    profile = compiled_profile(seed)
    ways = everything(profile)
    allowed = [(peak, seconds) for peak, seconds, graphs in ways if graphs <= most]
    least, whole = min(peak for peak, _ in allowed), Solver(StepSimulator(profile)).untouched().step.peak_bytes
    for share in (0.2, 0.5, 0.8):
        budget = int(least + share * (whole - least))
        best = min(seconds for peak, seconds in allowed if peak <= budget)
        answer = Solver(StepSimulator(profile)).solve(budget)
        assert graphs_in(answer.solution.choices) <= most
        assert answer.step.peak_bytes <= budget
        assert answer.step.step_seconds <= TOLERANCE * best


def test_the_limit_is_felt() -> None:
    """Else the test above would pass without it: there are budgets whose best answer needs more than one graph."""
    ways = [everything(compiled_profile(seed)) for seed in range(3)]
    assert any(
        min(seconds for peak, seconds, _ in found if peak <= budget)
        < min((seconds for peak, seconds, graphs in found if peak <= budget and graphs == 1), default=float("inf"))
        for found in ways
        for budget in {peak for peak, _, _ in found}
    )


@pytest.mark.parametrize("seed", range(12))
def test_swaps_need_no_further_graph(seed: int) -> None:
    profile = compiled_profile(seed, swaps=True)
    dice = random.Random(seed)
    limit = GraphLimit(profile)
    for _ in range(20):
        choices = tuple(
            dice.choice(
                [LEFT_ALONE, Choice(0, (dice.choice((Fate.SAVE, Fate.SWAP)),), tuple(dice.choices(list(Fate), k=OPS)))]
            )
            for _ in range(BLOCKS)
        )
        within = limit.applied(choices)
        assert graphs_in(within) <= MOST_GRAPHS
        assert (within == choices) == (graphs_in(choices) <= MOST_GRAPHS)
        for before, after in zip(choices, within):
            if before.cut >= 0 and after.cut >= 0:  # what both keep leaves or stays as before, and so do the inputs
                assert after.inputs == before.inputs
                both = [at for at in range(OPS) if Fate.RECOMPUTE not in (before.fates[at], after.fates[at])]
                assert [after.fates[at] for at in both] == [before.fates[at] for at in both]
    swapped = Choice(0, (Fate.SWAP,), (Fate.SWAP,) * OPS)
    assert graph_of(swapped) == graph_of(Choice(0, (Fate.SAVE,), (Fate.SAVE,) * OPS)) != graph_of(LEFT_ALONE)
