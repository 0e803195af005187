"""Orders of pipeline schedules against brute force."""

from __future__ import annotations

import itertools

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.pipeline_order import (
    Action,
    ActionKind,
    Order,
    check_order,
    gpipe_order,
    in_flight,
    interleaved_order,
    loads_begin,
    makespan,
    most_in_flight,
    one_f_one_b_order,
    shortened,
    turns_of,
)

F, B, DX, DW = ActionKind


def by_unit_steps(orders: list[Order]) -> int:
    """Every action takes one tick; a rank runs its next action in the first tick in which what it needs is over."""
    last = max(action.stage for order in orders for action in order)
    done: set[Action] = set()
    position = [0] * len(orders)
    ticks = 0
    while any(at < len(order) for at, order in zip(position, orders)):
        ready = []
        for rank, order in enumerate(orders):
            if position[rank] == len(order):
                continue
            kind, stage, number = action = order[position[rank]]
            needs = [Action(F, stage - 1, number)] if kind is F and stage else []
            if kind is B:
                needs = [Action(F, stage, number)] + ([Action(B, stage + 1, number)] if stage < last else [])
            if done.issuperset(needs):
                ready.append((rank, action))
        assert ready, "stuck"
        for rank, action in ready:
            position[rank] += 1
            done.add(action)
        ticks += 1
    return ticks


@pytest.mark.parametrize(
    ("ranks", "count", "per_rank"), [(1, 3, 1), (4, 8, 1), (4, 4, 1), (3, 7, 1), (2, 4, 2), (4, 8, 2), (2, 4, 3)]
)
def test_an_order_runs_every_pass_once_and_the_makespan_is_that_of_unit_steps(
    ranks: int, count: int, per_rank: int
) -> None:
    orders = [interleaved_order(rank, ranks, per_rank, count) for rank in range(ranks)]
    for rank, order in enumerate(orders):
        check_order(order, who="test")
        assert len(order) == 2 * per_rank * count
        assert {action.stage for action in order} == {rank + ranks * number for number in range(per_rank)}
    spans = makespan(orders, lambda action: 1.0)
    assert max(end for _, end in spans.values()) == by_unit_steps(orders)
    if per_rank == 1:  # the known length of 1F1B and of GPipe
        assert by_unit_steps(orders) == 2 * (count + ranks - 1)
        assert by_unit_steps([gpipe_order(rank, count) for rank in range(ranks)]) == 2 * (count + ranks - 1)


@pytest.mark.parametrize(("stages", "count"), list(itertools.product((1, 2, 4), (4, 8))))
def test_how_many_are_in_flight(stages: int, count: int) -> None:
    for stage in range(stages):
        order = one_f_one_b_order(stage, stages, count)
        naive = []
        for position in range(len(order)):
            begun = [a.key for a in order[: position + 1] if a.kind is F]
            over = [a.key for a in order[:position] if a.kind is B]
            naive.append(len(set(begun) - set(over)))
        assert [rows[stage] for rows in in_flight(order)] == naive
        assert most_in_flight(order) == {stage: min(count, stages - stage)}
        assert most_in_flight(gpipe_order(stage, count)) == {stage: count}


def test_interleaved_holds_more_on_early_ranks() -> None:
    most = [sum(most_in_flight(interleaved_order(rank, 4, 2, 8)).values()) for rank in range(4)]
    assert most == sorted(most, reverse=True)
    assert most[0] > most[-1]


def test_a_backward_in_two_halves_is_alive_until_the_second() -> None:
    order = tuple(Action(*row) for row in [(F, 0, 0), (DX, 0, 0), (F, 0, 1), (DW, 0, 0), (DX, 0, 1), (DW, 0, 1)])
    check_order(order, who="test")
    assert [rows[0] for rows in in_flight(order)] == [1, 1, 2, 2, 1, 1]
    assert turns_of(order) == {(0, 0): (1, 3), (0, 1): (4, 5)}


def test_loads_begin_before_a_backward_of_a_pass_that_is_alive() -> None:
    order = one_f_one_b_order(0, 2, 3)
    assert [str(action) for action in order] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert [loads_begin(order, at) for at in range(6)] == [False, True, True, True, True, True]
    assert [loads_begin(one_f_one_b_order(0, 1, 2), at) for at in range(4)] == [False, True, False, True]


def test_a_shortened_order_holds_as_much() -> None:
    order = interleaved_order(0, 4, 2, 32)
    short = shortened(order)
    assert len(short) < len(order)
    assert most_in_flight(short) == most_in_flight(order)
    assert shortened(gpipe_order(0, 8)) == gpipe_order(0, 8)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(PlanError, match="micro-batch 1 runs 'F' in stage 0"):
        check_order((*gpipe_order(0, 1), Action(F, 0, 1)), who="test")
    with pytest.raises(
        PlanError, match="9 micro-batches cannot be split into 2 equal rounds; use a multiple of the 4 ranks"
    ):
        interleaved_order(0, 4, 2, 9)
    backwards_first = (Action(B, 0, 0), Action(F, 0, 0))
    with pytest.raises(PlanError, match="wait for one another and never end; they stand before 0B0"):
        makespan([backwards_first], lambda action: 1.0)


def test_a_hop_counts_between_ranks_only() -> None:
    order = tuple(Action(*row) for row in [(F, 0, 0), (F, 1, 0), (B, 1, 0), (B, 0, 0)])
    assert max(end for _, end in makespan([order], lambda action: 1.0, hop_seconds=5.0).values()) == 4.0
    two = [gpipe_order(0, 1), gpipe_order(1, 1)]
    assert max(end for _, end in makespan(two, lambda action: 1.0, hop_seconds=5.0).values()) == 14.0
