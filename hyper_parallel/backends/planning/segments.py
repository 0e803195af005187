"""What runs before and after the blocks: read from the points of trial steps."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from hyper_parallel.backends.planning.trials import BlockCall, TrialPoint, TrialStep
from hyper_parallel.planner.profile import Segment

__all__ = [
    "backward_seconds",
    "call_of",
    "call_order",
    "epilogue",
    "forward_seconds",
    "kept_bytes",
    "made_before_blocks",
    "median",
    "prologue",
]


def median(values: Sequence[float | None]) -> float | None:
    """Over what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def call_of(one: TrialStep, name: str) -> BlockCall:
    """The first call of a block."""
    return next(call for call in one.calls if call.block == name)


def forward_seconds(one: TrialStep, number: int) -> float | None:
    """How long the forward of call ``number`` took."""
    if number >= len(one.calls):
        return None
    call = one.calls[number]
    assert call.forward_begin is not None, "every call has a beginning"
    return None if call.forward_end is None else one.seconds(call.forward_begin, call.forward_end)


def backward_seconds(one: TrialStep, number: int) -> float | None:
    """How long its backward took; None for a block whose input needs no gradient."""
    if number >= len(one.calls):
        return None
    call = one.calls[number]
    if call.backward_begin is None or call.backward_end is None:
        return None
    return one.seconds(call.backward_begin, call.backward_end)


def kept_bytes(memory: TrialStep, name: str) -> int:
    """What backward keeps of an observed block."""
    seen = call_of(memory, name).seen
    assert seen is not None, "the block was observed"
    return sum(op.kept_bytes for op in seen.ops)


def made_before_blocks(memory: TrialStep) -> int:
    """Bytes that the step made before its first block."""
    first = memory.calls[0].forward_begin
    assert first is not None, "every call has a beginning"
    return max(0, first.active_bytes - memory.points[0].active_bytes)


def call_order(one: TrialStep) -> tuple[TrialPoint, ...] | None:
    """Where blocks begin and end: first forward, last forward, first backward, and last backward where it is known."""
    turn = _turn_of(one)
    first = one.calls[0].forward_begin
    if turn is None or first is None:
        return None
    end = one.calls[0].backward_end
    return (first, turn.last, turn.begin) if end is None else (first, turn.last, turn.begin, end)


def prologue(memory: TrialStep, timed: Sequence[TrialStep], input_bytes: int) -> Segment:
    """What runs before the blocks, and last in backward."""
    start, first = memory.points[0], memory.calls[0].forward_begin
    assert first is not None, "every call has a beginning"
    backward, backward_transient = 0.0, 0
    end = memory.calls[0].backward_end
    if end is not None:
        after = [point for point in memory.points if point.host_seconds > end.host_seconds]
        backward_transient = max((point.peak_bytes for point in after), default=0) - end.active_bytes
        backward = median([_after_blocks(one) for one in timed]) or 0.0
    return Segment(
        forward_seconds=median([_before_blocks(one) for one in timed]) or 0.0,
        backward_seconds=backward,
        kept_bytes=max(0, made_before_blocks(memory) - input_bytes),
        forward_transient_bytes=max(0, first.peak_bytes - start.active_bytes),
        backward_transient_bytes=max(0, backward_transient),
    )


def _before_blocks(one: TrialStep) -> float | None:
    first = one.calls[0].forward_begin
    return None if first is None else one.seconds(one.points[0], first)


def _after_blocks(one: TrialStep) -> float | None:
    end = one.calls[0].backward_end
    return None if end is None else one.seconds(end, one.points[-1])


@dataclasses.dataclass
class _Turn:
    """Between the last block's forward and its backward."""

    last: TrialPoint
    turn: TrialPoint  # where the model's forward ended
    begin: TrialPoint  # where the last block's backward begins
    inside: list[TrialPoint]  # every point between, the first excluded


def _turn_of(one: TrialStep) -> _Turn | None:
    last = max((call.forward_end for call in one.calls if call.forward_end), key=lambda point: point.host_seconds)
    begins = [call.backward_begin for call in one.calls if call.backward_begin is not None]
    begin = min(begins, key=lambda point: point.host_seconds) if begins else None
    if begin is None:
        return None
    inside = one.points[one.points.index(last) + 1 : one.points.index(begin) + 1]
    turn = next((point for point in reversed(inside) if point.name == "model forward ends"), last)
    return _Turn(last, turn, begin, inside)


def epilogue(memory: TrialStep, timed: Sequence[TrialStep]) -> Segment:
    """Head and loss."""
    turn = _turn_of(memory)
    if turn is None:
        return Segment()
    output = next(call.output_bytes for call in memory.calls if call.forward_end is turn.last)
    ground = turn.last.active_bytes - output
    at_turn = turn.inside.index(turn.turn) + 1 if turn.turn in turn.inside else 0
    forward = max((point.peak_bytes for point in turn.inside[:at_turn]), default=turn.last.active_bytes)
    backward = max((point.peak_bytes for point in turn.inside[at_turn:]), default=turn.turn.active_bytes)
    turns = [(one, _turn_of(one)) for one in timed]
    return Segment(
        forward_seconds=median([one.seconds(turn.last, turn.turn) for one, turn in turns if turn is not None]) or 0.0,
        backward_seconds=median([one.seconds(turn.turn, turn.begin) for one, turn in turns if turn is not None]) or 0.0,
        kept_bytes=max(0, turn.turn.active_bytes - ground),
        forward_transient_bytes=max(0, forward - ground),
        backward_transient_bytes=max(0, backward - turn.turn.active_bytes),
    )
