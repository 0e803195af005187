"""Makes the kinds of a profile from observed calls of blocks: bytes from one trial step, seconds from others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from hyper_parallel.backends.planning.module_tree import BlockRef, ModuleTree, structure_of
from hyper_parallel.backends.planning.observed import ObservedCall, ObservedOp
from hyper_parallel.backends.planning.trials import BlockCall, TrialStep
from hyper_parallel.planner.profile import BLOCK_INPUT, BlockKind, Cut, CutRegion, OpProfile

__all__ = ["group_by_kind", "make_kind", "shared_storages"]

_MOST_KINDS_OF_ONE_CLASS: Final = 4  # more: the ops depend on the data, and one call stands for all
_LEAST_OPS_OF_A_REGION: Final = 3
_LARGE_SHARE: Final = 0.2  # of the block's time: a child worth a region of its own


def group_by_kind(
    tree: ModuleTree, calls: Sequence[ObservedCall], blocks: Sequence[BlockRef]
) -> tuple[list[int], list[int]]:
    """The kind of every call, and for every kind the call that stands for it.

    Calls are alike when the module's class, its parameters and its ops are.
    """
    modules = {block.name: block.module for block in blocks}
    structures = [structure_of(tree, modules[call.block]) for call in calls]
    exact = [(structure, call.signature) for structure, call in zip(structures, calls)]
    variety = Counter(structure for structure, _ in set(exact))
    keys = [full if variety[full[0]] <= _MOST_KINDS_OF_ONE_CLASS else (full[0], ()) for full in exact]
    order = list(dict.fromkeys(keys))
    kinds = [order.index(key) for key in keys]
    return kinds, [
        _stands_for_all(calls, [at for at, kind in enumerate(kinds) if kind == number]) for number in range(len(order))
    ]


def _stands_for_all(calls: Sequence[ObservedCall], members: Sequence[int]) -> int:
    """The middle one where all are alike (the first and the last have neighbours of another kind), else the largest."""
    sizes = [sum(op.output_bytes for op in calls[at].ops) for at in members]
    return members[len(members) // 2] if len(set(sizes)) == 1 else members[sizes.index(max(sizes))]


def shared_storages(calls: Sequence[ObservedCall]) -> set[int]:
    """What every block is given: masks, rope tables."""
    if len(calls) < 2:
        return set()
    return set.intersection(*(set(call.input_storages) for call in calls))


def make_kind(
    name: str,
    memory: BlockCall,
    timings: Sequence[tuple[TrialStep, BlockCall]],
    *,
    forward_seconds: float | None,
    backward_seconds: float | None,
    runs_from_tape: bool,
    host_seconds: tuple[float, float],
) -> BlockKind:
    """One kind. The seconds of the block, where they were measured without an observer, scale those of its ops."""
    seen = memory.seen
    assert seen is not None, "the block that stands for its kind was observed"
    seconds = _op_seconds(seen, timings)
    if forward_seconds is not None and sum(seconds) > 0:
        seconds = [value * min(1.0, forward_seconds / sum(seconds)) for value in seconds]
    node_seconds, measured_backward = _node_seconds(len(seen.ops), timings)
    node_bytes = _node_bytes(memory)
    count = len(seen.ops)
    ops = tuple(
        OpProfile(
            name=op.name,
            overload=op.overload,
            module=op.module,
            occurrence=op.occurrence,
            seconds=seconds[at],
            output_bytes=op.output_bytes,
            kept_bytes=min(op.kept_bytes, op.output_bytes),
            inputs=op.inputs,
            alias=op.alias,
            kept_by=_clamped(op.kept_by, at, count) if op.kept_bytes else (),
            is_random=op.is_random,
            is_keepable=op.is_keepable,
            reason=op.reason,
            workspace_bytes=op.workspace_bytes,
            backward_seconds=node_seconds[at],
            backward_bytes=node_bytes[at],
            runs_once=op.runs_once,
        )
        for at, op in enumerate(seen.ops)
    )
    return BlockKind(
        name=name,
        ops=ops,
        cuts=_cuts(seen, seconds),
        backward_seconds=measured_backward if backward_seconds is None else backward_seconds,
        backward_transient_bytes=max(node_bytes, default=0),
        input_kept_by=_clamped(seen.input_kept_by, 0, count),
        runs_from_tape=runs_from_tape,
        host_forward_seconds=host_seconds[0],
        host_backward_seconds=host_seconds[1],
    )


def _clamped(indices: Iterable[int], least: int, count: int) -> tuple[int, ...]:
    return tuple(sorted({min(max(index, least), count - 1) for index in indices}))


def _op_seconds(seen: ObservedCall, timings: Sequence[tuple[TrialStep, BlockCall]]) -> list[float]:
    """Medians over the trials that ran the same ops; where none did, the medians by name."""
    names = [(op.name, op.overload) for op in seen.ops]
    measured: list[list[float]] = []
    by_name: dict[tuple[str, str], list[float]] = {}
    for trial, call in timings:
        assert call.seen is not None, "the block was observed"
        times = [trial.meter.seconds(op.start, op.end) for op in call.seen.ops]
        for op, value in zip(call.seen.ops, times):
            by_name.setdefault((op.name, op.overload), []).append(value)
        if [(op.name, op.overload) for op in call.seen.ops] == names:
            measured.append(times)
    if measured:
        return [statistics.median(values) for values in zip(*measured)]
    return [statistics.median(by_name.get(name, [0.0])) for name in names]


def _node_seconds(count: int, timings: Sequence[tuple[TrialStep, BlockCall]]) -> tuple[list[float], float]:
    totals: list[list[float]] = []
    for _, call in timings:
        assert call.seen is not None, "the block was observed"
        if len(call.seen.ops) != count:
            continue
        total = [0.0] * count
        for node in call.nodes:
            total[node.op] += node.seconds
        totals.append(total)
    if not totals:
        return [0.0] * count, 0.0
    medians = [statistics.median(values) for values in zip(*totals)]
    return medians, sum(medians)


def _node_bytes(memory: BlockCall) -> list[int]:
    """Device bytes above the values still kept while each node ran (see ``OpProfile.backward_bytes``)."""
    seen, begin = memory.seen, memory.backward_begin
    assert seen is not None, "the block was observed"
    count = len(seen.ops)
    result = [0] * count
    if begin is None:
        return result
    held_by: list[tuple[int, int]] = [
        (min(min(op.kept_by), count - 1), op.kept_bytes) for op in seen.ops if op.kept_bytes and op.kept_by
    ]
    ground = begin.active_bytes - memory.output_bytes
    for node in memory.nodes:
        freed = sum(nbytes for holder, nbytes in held_by if holder > node.op)
        result[node.op] = max(result[node.op], node.peak_bytes - (ground - freed))
    return result


def _cuts(seen: ObservedCall, seconds: Sequence[float]) -> tuple[Cut, ...]:
    """The whole block; its children; its large children."""
    whole = Cut(regions=(CutRegion(module="", first_op=0, stop_op=len(seen.ops)),))
    regions = [child for child in _child_regions(seen) if _is_worth_a_region(seen.ops[child[1] : child[2]])]
    large = [child for child in regions if sum(seconds[child[1] : child[2]]) >= _LARGE_SHARE * sum(seconds)]
    cuts = [whole]
    for chosen in (regions, large):
        cut = Cut(regions=tuple(_region(seen, *child) for child in chosen)) if len(chosen) > 1 else None
        if cut is not None and cut not in cuts:
            cuts.append(cut)
    return tuple(cuts)


def _child_regions(seen: ObservedCall) -> list[tuple[str, int, int]]:
    """Direct children that ran once, in one stretch."""
    regions: list[tuple[str, int, int]] = []
    owners = [op.module.partition(".")[0] for op in seen.ops]
    for child in dict.fromkeys(owner for owner in owners if owner):
        mine = [at for at, owner in enumerate(owners) if owner == child]
        is_one_stretch = mine[-1] - mine[0] + 1 == len(mine)
        if is_one_stretch and seen.module_calls.get(child) == 1:
            regions.append((child, mine[0], mine[-1] + 1))
    return regions


def _is_worth_a_region(ops: Sequence[ObservedOp]) -> bool:
    return sum(op.is_asked for op in ops) >= _LEAST_OPS_OF_A_REGION and any(op.kept_bytes for op in ops)


def _region(seen: ObservedCall, module: str, first: int, stop: int) -> CutRegion:
    read = {value for op in seen.ops[first:stop] for value in op.inputs if value < first}
    return CutRegion(module=module, first_op=first, stop_op=stop, inputs=tuple(sorted(read)) or (BLOCK_INPUT,))
