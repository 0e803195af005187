"""The neighbourhood of a set of fates: what may be changed in one step of the search.

Blocks of one kind are a row, and each slot (an op that may be kept, a region's input) has one fate for each of them.
Good plans are made of few runs of equal fates: early blocks swap, middle ones recompute, late ones save, the last are left
alone. So a move shifts the end of a run, changes a run, or starts a new one at an end; in short rows any single block may
change.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice, KindAnalysis
from hyper_parallel.planner.profile import EngineSettings, OpProfile

__all__ = ["Move", "Slot", "Solution", "Space"]

SHORT_ROW: Final = 6  # blocks of a kind up to which every single block is tried
MOST_WHOLE: Final = 400  # ways to treat a block up to which all of them are tried
_LEAST_SHARE: Final = 1e-3  # of the forward's time: what all instances of an op must cost to be considered
_FACTORS: Final = (0.5, 0.75, 1.5, 2.0)


class Slot(NamedTuple):
    """Something of a kind that has a fate: op number ``at``, or the input of region number ``at``, under one cut."""

    kind: int
    cut: int
    is_input: bool
    at: int
    nbytes: int
    seconds: float  # that a replay takes less where it alone is kept

    @property
    def density(self) -> float:
        """Seconds of recomputation that one byte saves."""
        return self.seconds / self.nbytes


class Solution(NamedTuple):
    """One choice per block, and the engine's settings."""

    choices: tuple[Choice, ...]
    settings: EngineSettings


Move = Callable[[Solution], Solution]


def fate_of(choice: Choice, slot: Slot) -> Fate | None:
    """The fate of a slot; None where the block is left alone or cut otherwise."""
    if choice.cut != slot.cut:
        return None
    return (choice.inputs if slot.is_input else choice.fates)[slot.at]


def with_fate(choice: Choice, slot: Slot, fate: Fate) -> Choice:
    """The same choice with one fate changed."""
    if choice.cut != slot.cut:
        return choice
    fates = choice.inputs if slot.is_input else choice.fates
    fates = (*fates[: slot.at], fate, *fates[slot.at + 1 :])
    return Choice(choice.cut, fates, choice.fates) if slot.is_input else Choice(choice.cut, choice.inputs, fates)


class Space:
    """The kinds of a profile, seen as rows and slots."""

    def __init__(
        self, analyses: Sequence[KindAnalysis], kinds: Sequence[int], input_bytes: Sequence[int], min_bytes: int
    ) -> None:
        self.analyses = analyses
        self.min_bytes = min_bytes
        self.rows = {kind: [at for at, other in enumerate(kinds) if other == kind] for kind in sorted(set(kinds))}
        self.seconds = sum(
            len(row) * sum(op.seconds for op in analyses[kind].kind.ops) for kind, row in self.rows.items()
        )
        self.slots = {
            (kind, cut): self._slots(kind, cut, max(input_bytes[at] for at in row))
            for kind, row in self.rows.items()
            for cut in range(len(analyses[kind].kind.cuts))
        }
        self.whole = {kind: self._whole_choices(kind) for kind, row in self.rows.items() if len(row) <= SHORT_ROW}
        self.largest = max((slot.nbytes for slots in self.slots.values() for slot in slots), default=0)

    def _slots(self, kind: int, cut: int, input_bytes: int) -> list[Slot]:
        analysis = self.analyses[kind]
        ops = analysis.kind.ops
        regions = analysis.kind.cuts[cut].regions
        taken = {value for region in regions for value in analysis.roots(region.inputs)}
        found = []
        for number, region in enumerate(regions):
            held = sum(input_bytes if value < 0 else ops[value].output_bytes for value in analysis.roots(region.inputs))
            if held >= max(1, self.min_bytes):
                found.append(Slot(kind, cut, True, number, held, 0.0))
            own = range(region.first_op, analysis.replay_stop(region))
            keepable = [at for at in own if ops[at].is_keepable and ops[at].output_bytes and at not in taken]
            spared = {at: analysis.spared(region, (), at) for at in keepable}
            for at in _undominated(spared, ops):
                seconds = analysis.seconds_of(spared[at])
                if self._is_worth_it(kind, seconds):
                    found.append(Slot(kind, cut, False, at, ops[at].output_bytes, seconds))
        return found

    def _is_worth_it(self, kind: int, seconds: float) -> bool:
        return seconds > 0 and seconds * len(self.rows[kind]) >= _LEAST_SHARE * self.seconds

    def by_density(self, kind: int, cut: int) -> list[Slot]:
        """The ops' slots of a kind, those that spare most for a byte first, each where the ones before it are kept.

        What a slot spares shrinks with what is kept already, so only the slot that seems best is looked at again.
        """
        analysis = self.analyses[kind]
        ordered: list[Slot] = []
        for region in analysis.kind.cuts[cut].regions:
            own = range(region.first_op, region.stop_op)
            kept: set[int] = set()
            waiting = [(-slot.density, slot) for slot in self.slots[kind, cut] if not slot.is_input and slot.at in own]
            heapq.heapify(waiting)
            while waiting:
                _, slot = heapq.heappop(waiting)
                seconds = analysis.seconds_of(analysis.spared(region, kept, slot.at))
                now = slot._replace(seconds=seconds)
                if not self._is_worth_it(kind, seconds):
                    continue
                if waiting and -now.density > waiting[0][0]:
                    heapq.heappush(waiting, (-now.density, now))
                    continue
                kept.add(slot.at)
                ordered.append(now)
        return sorted(ordered, key=lambda slot: -slot.density)

    def _whole_choices(self, kind: int) -> list[Choice]:
        """Everything that can become of a block, where that is a short list."""
        cuts = range(len(self.analyses[kind].kind.cuts))
        ways = sum(math.prod(len(self.may_be(slot)) for slot in self.slots[kind, cut]) for cut in cuts)
        if ways > MOST_WHOLE:
            return [LEFT_ALONE, *self._templates(kind)]
        found = [LEFT_ALONE]
        for cut in cuts:
            slots = self.slots[kind, cut]
            for fates in itertools.product(*(self.may_be(slot) for slot in slots)):
                choice = self.plain(kind, cut, inputs=Fate.SAVE)
                for slot, fate in zip(slots, fates):
                    choice = with_fate(choice, slot, fate)
                found.append(choice)
        return found

    def may_be(self, slot: Slot) -> tuple[Fate, ...]:
        """The fates that a slot may have."""
        fates = (Fate.SAVE,) if slot.is_input else (Fate.RECOMPUTE, Fate.SAVE)
        return (*fates, Fate.SWAP) if slot.nbytes >= self.min_bytes else fates

    def plain(self, kind: int, cut: int, *, inputs: Fate) -> Choice:
        """Everything recomputed."""
        analysis = self.analyses[kind]
        return Choice(cut, (inputs,) * len(analysis.kind.cuts[cut].regions), (Fate.RECOMPUTE,) * len(analysis.kind.ops))

    def region_bytes(self, swapped: Sequence[Slot]) -> int:
        """The most bytes of these slots, inputs included, that one region asks for."""
        most = self.largest
        for (kind, cut), slots in self.slots.items():
            for region in self.analyses[kind].kind.cuts[cut].regions:
                own = [
                    slot.nbytes
                    for slot in swapped
                    if (slot.kind, slot.cut) == (kind, cut) and region.first_op <= slot.at < region.stop_op
                ]
                inputs = max((slot.nbytes for slot in slots if slot.is_input), default=0)
                most = max(most, sum(own) + inputs)
        return most

    @property
    def is_short(self) -> bool:
        """Whether there are few blocks in all."""
        return sum(map(len, self.rows.values())) <= SHORT_ROW

    def two_blocks(self, solution: Solution) -> Iterator[Solution]:
        """Every choice for any two blocks of short rows."""
        kind_of = {at: kind for kind in self.whole for at in self.rows[kind]}
        for first, second in itertools.combinations(sorted(kind_of), 2):
            for one, other in itertools.product(self.whole[kind_of[first]], self.whole[kind_of[second]]):
                choices = list(solution.choices)
                choices[first], choices[second] = one, other
                yield Solution(tuple(choices), solution.settings)

    def random(self, dice: random.Random, settings: EngineSettings) -> Solution:
        """Any choice for every block of a short row; everything recomputed elsewhere."""
        chosen = {
            at: dice.choice(self.whole[kind]) if kind in self.whole else self.plain(kind, 0, inputs=Fate.SWAP)
            for kind, row in self.rows.items()
            for at in row
        }
        return Solution(tuple(chosen[at] for at in sorted(chosen)), settings)

    # ------------------------------------------------------------------ moves

    def moves(self, solution: Solution, step: int) -> Iterator[Move]:
        """Everything one step away; the ends of runs shift by ``step`` blocks."""
        for kind, row in self.rows.items():
            cuts = sorted({solution.choices[at].cut for at in row} - {LEFT_ALONE.cut})
            for cut in cuts:
                for slot in self.slots[kind, cut]:
                    fates = [fate_of(solution.choices[at], slot) for at in row]
                    for changed, fate in _row_moves(fates, self.may_be(slot), step):
                        blocks = row[changed.start : changed.stop]
                        yield functools.partial(_set_fate, blocks=blocks, slot=slot, fate=fate)
            yield from self._keep_moves(solution, kind, row, step)
            yield from self._cut_moves(kind, row)
        yield from self._settings_moves(solution)

    def _keep_moves(self, solution: Solution, kind: int, row: list[int], step: int) -> Iterator[Move]:
        choices = solution.choices
        kept = [at for at in row if choices[at].cut < 0]
        touched = [at for at in row if choices[at].cut >= 0]
        if touched:
            yield functools.partial(_set_choice, blocks=touched[-step:], choice=LEFT_ALONE)
        templates = {choices[at] for at in (touched[0], touched[-1])} if touched else set(self._templates(kind))
        for template in sorted(templates):
            if kept:
                yield functools.partial(_set_choice, blocks=kept[:step], choice=template)
        for at in row if kind in self.whole else ():
            for choice in sorted({*self.whole[kind], *(choices[other] for other in row)}):
                yield functools.partial(_set_choice, blocks=[at], choice=choice)

    def _templates(self, kind: int) -> Iterator[Choice]:
        for cut in range(len(self.analyses[kind].kind.cuts)):
            for inputs in (Fate.SAVE, Fate.SWAP):
                yield self.plain(kind, cut, inputs=inputs)

    def _cut_moves(self, kind: int, row: list[int]) -> Iterator[Move]:
        cuts = self.analyses[kind].kind.cuts
        for cut in range(len(cuts)) if len(cuts) > 1 else ():
            yield functools.partial(_set_cut, blocks=row, cut=cut, regions=len(cuts[cut].regions))

    def _settings_moves(self, solution: Solution) -> Iterator[Move]:
        settings = solution.settings
        if not settings.is_tunable or not any(Fate.SWAP in choice.inputs + choice.fates for choice in solution.choices):
            return
        for name in ("window_bytes", "tail_bytes", "prefetch_bytes"):
            now = getattr(settings, name)
            others = {int(now * factor) for factor in _FACTORS} | {now + self.largest, max(0, now - self.largest)}
            for value in sorted(others - {now}):
                yield functools.partial(_set_setting, name=name, value=value)


def _undominated(spared: Mapping[int, frozenset[int]], ops: Sequence[OpProfile]) -> list[int]:
    """Without the ops that do not run where another op's output is kept that takes no more bytes."""
    return [
        at
        for at in spared
        if not any(
            at in others and other != at and ops[other].output_bytes <= ops[at].output_bytes
            for other, others in spared.items()
        )
    ]


def _set_fate(solution: Solution, *, blocks: Sequence[int], slot: Slot, fate: Fate) -> Solution:
    choices = list(solution.choices)
    for at in blocks:
        choices[at] = with_fate(choices[at], slot, fate)
    return Solution(tuple(choices), solution.settings)


def _set_choice(solution: Solution, *, blocks: Sequence[int], choice: Choice) -> Solution:
    choices = list(solution.choices)
    for at in blocks:
        choices[at] = choice
    return Solution(tuple(choices), solution.settings)


def _set_cut(solution: Solution, *, blocks: Sequence[int], cut: int, regions: int) -> Solution:
    """The same fates under another cut; the inputs of its regions follow the first one."""
    choices = list(solution.choices)
    for at in blocks:
        if choices[at].cut not in (LEFT_ALONE.cut, cut):
            choices[at] = Choice(cut, choices[at].inputs[:1] * regions, choices[at].fates)
    return Solution(tuple(choices), solution.settings)


def _set_setting(solution: Solution, *, name: str, value: int) -> Solution:
    changes: dict[str, int] = {name: value}
    return Solution(solution.choices, dataclasses.replace(solution.settings, **changes))  # type: ignore[arg-type]


def _row_moves(row: list[Fate | None], may_be: tuple[Fate, ...], step: int) -> list[tuple[range, Fate]]:
    """Ranges of a row, and the fate that each would get."""
    moves: dict[tuple[int, int, Fate], None] = {}
    at = 0
    for now, group in itertools.groupby(row):
        start, at = at, at + len(list(group))
        for fate in () if now is None else may_be:
            if fate is not now:
                moves[start, at, fate] = None
                moves[start, min(at, start + step), fate] = None
                moves[max(start, at - step), at, fate] = None
    if len(row) <= SHORT_ROW:
        for position, now in enumerate(row):
            for fate in () if now is None else may_be:
                if fate is not now:
                    moves[position, position + 1, fate] = None
    return [(range(start, stop), fate) for start, stop, fate in moves]
