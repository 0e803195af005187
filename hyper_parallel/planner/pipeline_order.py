"""In which order a rank of a pipeline runs its forwards and backwards, and what follows from the order alone.

A *pass* is the forward and the backward of one micro-batch through one stage. Its backward may be one action, or two: one for
the gradient of the input and a later one for those of the weights (zero-bubble schedules).

How many passes are in flight decides how much memory a stage needs. The order of the backwards to come decides which swapped
bytes are needed next. And with the seconds of every action the orders of all ranks give the length of the step.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from hyper_parallel.errors import PlanError

__all__ = [
    "Action",
    "ActionKind",
    "Order",
    "Pass",
    "check_order",
    "gpipe_order",
    "in_flight",
    "interleaved_order",
    "loads_begin",
    "makespan",
    "most_in_flight",
    "one_f_one_b_order",
    "shortened",
    "turns_of",
]

Pass: TypeAlias = tuple[int, int]  # (stage, micro-batch)


class ActionKind(str, enum.Enum):
    """What a rank does with one micro-batch. The value is the letter that schedules are written with."""

    FORWARD = "F"
    BACKWARD = "B"  # all of it
    INPUT = "I"  # the gradient of the stage's input only; WEIGHT follows later
    WEIGHT = "W"


class Action(NamedTuple):
    """One forward, or one backward or a part of it."""

    kind: ActionKind
    stage: int
    micro_batch: int

    @property
    def key(self) -> Pass:
        """The pass that it belongs to."""
        return self.stage, self.micro_batch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Order: TypeAlias = tuple[Action, ...]  # of one rank

_FORWARD: Final = ActionKind.FORWARD
_LAST_PARTS: Final = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT})
_MOST_EXTRA: Final = 2  # passes beyond those in flight that a shortened order keeps


def gpipe_order(stage: int, micro_batches: int) -> Order:
    """All forwards, then all backwards, the first micro-batch first."""
    forwards = [Action(_FORWARD, stage, number) for number in range(micro_batches)]
    return (*forwards, *(Action(ActionKind.BACKWARD, stage, number) for number in range(micro_batches)))


def one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> Order:
    """Forwards until each later stage has one, then a forward and a backward in turns, then the rest of the backwards."""
    return interleaved_order(stage, stages, 1, micro_batches)


def interleaved_order(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> Order:
    """1F1B of several stages on each rank. Rank r holds the stages r, r + ranks, ...

    Micro-batches go through in rounds of as many as there are ranks: all of a round through the rank's first stage, then all of
    it through the second, and so on; backwards likewise from the last stage on.
    """
    rounds = max(1, micro_batches // ranks)
    if stages_per_rank > 1 and micro_batches % rounds:
        raise PlanError(
            f"interleaved_order: {micro_batches} micro-batches cannot be split into {rounds} equal rounds; use a multiple of the "
            f"{ranks} ranks"
        )
    size = micro_batches // rounds if stages_per_rank > 1 else micro_batches

    def passes(stages: Sequence[int]) -> list[Pass]:
        found = []
        for first in range(0, micro_batches, size):
            for stage in stages:
                found += [(stage, number) for number in range(first, min(first + size, micro_batches))]
        return found

    own = [rank + ranks * number for number in range(stages_per_rank)]
    forwards = [Action(_FORWARD, *each) for each in passes(own)]
    backwards = [Action(ActionKind.BACKWARD, *each) for each in passes(own[::-1])]
    hops = ranks - 1 - rank
    ahead = hops if stages_per_rank == 1 else (stages_per_rank - 1) * size + 2 * hops
    found = forwards[: min(ahead, len(forwards))]
    for forward, backward in zip(forwards[len(found) :], backwards):
        found += [forward, backward]
    done = len(forwards) - min(ahead, len(forwards))
    return (*found, *backwards[done:])


def check_order(order: Order, *, who: str) -> None:
    """Refuse an order in which a pass is not a forward followed by one whole backward."""
    seen: dict[Pass, str] = defaultdict(str)
    for action in order:
        seen[action.key] += action.kind.value
    wrong = {key: kinds for key, kinds in seen.items() if kinds not in ("FB", "FIW")}
    if wrong:
        key, kinds = next(iter(wrong.items()))
        raise PlanError(
            f"{who}: cannot read this schedule; micro-batch {key[1]} runs {kinds!r} in stage {key[0]}, and a forward (F) with "
            "one backward (B), or with its two halves (I, W), is what is known. Use a preset, such as 'boundary'."
        )


def in_flight(order: Order) -> list[dict[int, int]]:
    """For every action, how many passes of each stage are alive while it runs."""
    alive: dict[int, int] = {}
    found = []
    for action in order:
        if action.kind is _FORWARD:
            alive[action.stage] = alive.get(action.stage, 0) + 1
        found.append(dict(alive))
        if action.kind in _LAST_PARTS:
            alive[action.stage] -= 1
    return found


def most_in_flight(order: Order) -> dict[int, int]:
    """The most passes of each stage that are alive at one time."""
    most: dict[int, int] = {}
    for alive in in_flight(order):
        for stage, count in alive.items():
            most[stage] = max(most.get(stage, 0), count)
    return most


def turns_of(order: Order) -> dict[Pass, tuple[int, ...]]:
    """Where in the order the backwards of each pass stand."""
    found: dict[Pass, tuple[int, ...]] = {}
    for position, action in enumerate(order):
        if action.kind is not _FORWARD:
            found[action.key] = (*found.get(action.key, ()), position)
    return found


def loads_begin(order: Order, position: int) -> bool:
    """Whether loads for the next backward begin with this action: it is one, or the next one is, of a pass that is alive."""
    action = order[position]
    if action.kind is not _FORWARD:
        return True
    following = order[position + 1] if position + 1 < len(order) else action
    return following.kind is not _FORWARD and following.key != action.key


def shortened(order: Order) -> Order:
    """The same order with the first micro-batches only: enough of them that as many are in flight.

    A search simulates an order thousands of times, and a long schedule repeats itself.
    """
    wanted = most_in_flight(order)
    count = 1 + max((action.micro_batch for action in order), default=0)
    for most in range(max(wanted.values(), default=0) + _MOST_EXTRA, count):
        kept = tuple(action for action in order if action.micro_batch < most)
        if most_in_flight(kept) == wanted and _joint_peak(kept) == _joint_peak(order):
            return kept
    return order


def _joint_peak(order: Order) -> int:
    return max((sum(alive.values()) for alive in in_flight(order)), default=0)


class _Board:
    """When each action of all ranks ended, and on which rank each stage is."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self.ends: dict[Action, float] = {}
        self.rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        self.last = max(self.rank_of)

    def needed(self, action: Action) -> Iterable[Action]:
        """What must be over before an action, on other ranks or this one."""
        kind, stage, number = action
        if kind is _FORWARD:
            return () if stage == 0 else (Action(_FORWARD, stage - 1, number),)
        own = Action(ActionKind.INPUT if kind is ActionKind.WEIGHT else _FORWARD, stage, number)
        if kind is ActionKind.WEIGHT or stage == self.last:
            return (own,)
        whole = Action(ActionKind.BACKWARD, stage + 1, number)
        half = Action(ActionKind.INPUT, stage + 1, number)
        return own, half if half in self.ends else whole

    def ready(self, action: Action, hop_seconds: float) -> float | None:
        """When an action may begin; None where something it needs has not run."""
        moments = [0.0]
        for other in self.needed(action):
            if other not in self.ends:
                return None
            is_far = self.rank_of[other.stage] != self.rank_of[action.stage]
            moments.append(self.ends[other] + hop_seconds * is_far)
        return max(moments)


def makespan(
    orders: Sequence[Order], seconds: Callable[[Action], float] | Mapping[Action, float], *, hop_seconds: float = 0.0
) -> dict[Action, tuple[float, float]]:
    """When every action begins and ends, where every rank runs its order and waits for what the others send.

    ``hop_seconds``: what an activation or a gradient takes from one rank to another.

    Raises:
        PlanError: the ranks wait for one another and never end.
    """
    take = seconds.__getitem__ if isinstance(seconds, Mapping) else seconds
    board = _Board(orders)
    spans: dict[Action, tuple[float, float]] = {}
    position, free = [0] * len(orders), [0.0] * len(orders)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                ready = board.ready(action, hop_seconds)
                if ready is None:
                    break
                begin = max(free[rank], ready)
                free[rank] = board.ends[action] = begin + take(action)
                spans[action] = begin, free[rank]
                position[rank] += 1
                is_moving = True
    stuck = [str(order[at]) for at, order in zip(position, orders) if at < len(order)]
    if stuck:
        raise PlanError(f"makespan: the ranks wait for one another and never end; they stand before {', '.join(stuck)}")
    return spans
