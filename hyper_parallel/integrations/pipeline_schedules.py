"""What torch's pipeline schedules say of themselves, read once: their stages and this rank's order of actions.

Schedules of several stages carry their order. Those of one stage are loops in torch's code, and their order is computed here
(``planner.pipeline_order``); a subclass of them may run another one, so only torch's own two are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from hyper_parallel.errors import PlanError
from hyper_parallel.planner.pipeline_order import (
    Action,
    ActionKind,
    Order,
    check_order,
    gpipe_order,
    one_f_one_b_order,
)

__all__ = ["is_schedule", "order_of", "stages_of"]

_WHO: Final = "integrations.pipelining.apply"
_KINDS: Final = {kind.value: kind for kind in ActionKind}
_OVERLAPPED: Final = "OVERLAP_F_B"  # a forward and a backward that torch runs one after the other
_KNOWN: Final = (
    "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble, "
    "ScheduleZBVZeroBubble, ScheduleDualPipeV"
)


def stages_of(target: Any) -> list[Any]:
    """The stages of a schedule, of a list, or the one stage itself."""
    if isinstance(target, list | tuple):
        return list(target)
    for name in ("_stages", "_stage"):  # a schedule of many stages, of one
        if hasattr(target, name):
            found = getattr(target, name)
            return list(found) if isinstance(found, list | tuple) else [found]
    return [target]


def is_schedule(target: Any) -> bool:
    """Whether it is a schedule, and not only stages."""
    return hasattr(target, "_stages") or hasattr(target, "_stage")


def order_of(schedule: Any) -> Order:
    """This rank's forwards and backwards, in the order in which the schedule runs them.

    Raises:
        PlanError: a schedule whose order is not known.
    """
    count = int(schedule._n_microbatches)
    name = type(schedule).__name__
    if hasattr(schedule, "_stages"):
        order = _order_of_many(schedule)
    elif name == "ScheduleGPipe":
        order = gpipe_order(schedule._stage.stage_index, count)
    elif name == "Schedule1F1B":
        order = one_f_one_b_order(schedule._stage.stage_index, schedule._stage.num_stages, count)
    else:
        order = ()
    if not order:
        raise PlanError(
            f"{_WHO}: cannot plan a budget for {name}, because in which order it runs forwards and backwards is not known. "
            f"Known are {_KNOWN}, and every schedule with a pipeline_order. Use a preset instead, such as 'boundary'."
        )
    check_order(order, who=_WHO)
    return order


def _order_of_many(schedule: Any) -> Order:
    stages = schedule._stages
    rank = stages[0].group_rank
    orders = getattr(schedule, "pipeline_order_with_comms", None) or getattr(schedule, "pipeline_order", None) or {}
    first = next((stage.stage_index for stage in stages if stage.is_first), None)
    return tuple(action for row in orders.get(rank, ()) for action in _actions(row, first))


def _actions(row: Any, first: int | None) -> Iterator[Action]:  # row: torch's _Action, or None for a bubble
    if row is None:
        return
    name = row.computation_type.value
    if name == _OVERLAPPED:
        for part in row.sub_actions or ():
            yield from _actions(part, first)
        return
    kind = _KINDS.get(name)
    if kind is None:  # communication, or the weights of a sharded stage
        return
    if row.stage_index == first:  # it has no gradient to send: torch runs all of its backward in the second half
        if kind is ActionKind.INPUT:
            return
        kind = ActionKind.BACKWARD if kind is ActionKind.WEIGHT else kind
    yield Action(kind, row.stage_index, row.microbatch_index)
