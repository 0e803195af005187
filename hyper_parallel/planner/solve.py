"""The search: which fates give the shortest step whose peak fits.

1. A step that fits is left alone.
2. Seeds. Slots are ordered by the seconds of recomputation that one byte saves. For every number of slots that leave for
   far memory, the rest is filled: saves are added in that order, late blocks first, as long as the simulator says it fits.
3. Search. From the best seeds, moves that shorten the step and still fit are taken. At the edge of the budget most gains
   need memory, so a gain that does not fit is tried together with a move that gives memory back.

Compiled blocks may have few graphs: every solution is brought within that limit before it is simulated (``graph_limit``).

Every judgement is the simulator's; the order of bytes and seconds only decides what is tried first. The amount of work
is bounded, so the same question has the same answer on any machine.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, UNEXPLAINED, Choice
from hyper_parallel.planner.by_hand import choices_by_hand
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.graph_limit import GraphLimit
from hyper_parallel.planner.moves import Move, Slot, Solution, Space, with_fate
from hyper_parallel.planner.profile import Block, EngineSettings
from hyper_parallel.planner.step_simulator import SimulatedStep, StepSimulator

__all__ = ["Answer", "MeasuredStep", "Solver", "with_measured"]

MOST_EVENTS: Final = 1_200_000  # of traces, simulated or made; one or two seconds
_SWAP_COUNTS: Final = 8
_NEARBY: Final = (0.95, 1.0, 1.05)  # shares of a budget whose best answers are carried over to other corrections
_CARRIED: Final = 10
# What a simpler plan may cost, as shares of the step: see Answer.
_RECIPE_PRICE: Final = 5e-5
_SWAP_PRICE: Final = 2e-6
_TOUCH_PRICE: Final = 1e-6


class Pace(NamedTuple):
    """How a search spends its time."""

    starts: int  # seeds to descend from
    pairs: int  # pairs of moves to try where no single one helps
    kick: int  # moves at random that leave the best answer
    misses: int  # kicks in vain that end the search


_LONG: Final = Pace(starts=2, pairs=40, kick=2, misses=8)
_SHORT: Final = Pace(starts=4, pairs=400, kick=3, misses=20)  # few blocks: moves are many for what there is, and cheap

Key = tuple[float, float, float, float]


class MeasuredStep(NamedTuple):
    """What a solution came to when it was tried."""

    peak_bytes: int
    step_seconds: float | None  # None: not known


class Answer:
    """A solution and what it comes to."""

    __slots__ = ("score", "solution", "step")

    def __init__(self, solution: Solution, step: SimulatedStep) -> None:
        self.solution = solution
        self.step = step
        # A plan that a person can read is worth a little time, less than can be measured.
        touched = [choice for choice in solution.choices if choice.cut != LEFT_ALONE.cut]
        extra = _RECIPE_PRICE * len(set(touched)) + _TOUCH_PRICE * len(touched) + _SWAP_PRICE * step.swapped_values
        self.score = step.step_seconds + step.compute_seconds * extra

    def key(self, budget: int) -> Key:
        """Smaller is better: what fits before what does not; then time, peak, bytes moved."""
        step = self.step
        if step.peak_bytes <= budget:
            return (0.0, self.score, step.peak_bytes, step.out_bytes)
        return (1.0, step.peak_bytes, self.score, step.out_bytes)


class Solver:
    """Searches the fates of one profile; what was simulated is remembered between budgets."""

    def __init__(self, simulator: StepSimulator) -> None:
        self.profile = simulator.profile
        self.simulator = simulator
        self.space = Space(
            simulator.analyses,
            [block.kind for block in self.profile.blocks],
            [block.input_bytes for block in self.profile.blocks],
            self.profile.engine.min_bytes,
        )
        self.pace = _SHORT if self.space.is_short else _LONG
        self._tied = _tied(self.profile.blocks)
        is_compiled = any(kind.graph is not None for kind in self.profile.kinds)
        self._limit = GraphLimit(self.profile) if is_compiled else None
        self.by_hand = choices_by_hand(self.profile)
        self._simulated: dict[Solution, Answer] = {}
        self._measured: dict[Solution, MeasuredStep] = {}
        self._has_seeds = False
        self._stop_at = 0

    def corrected(self, corrections: Corrections, budget: int) -> Solver:
        """A solver with other corrections, which starts from what this one found for budgets near ``budget``."""
        other = copy.copy(self)
        other.simulator = self.simulator.corrected(corrections)
        other._simulated = {}
        for solution in self._measured:
            other.simulate(solution)
        for share in _NEARBY:
            near = int(share * budget)
            for known in self.best_ones(near, _CARRIED):
                other.simulate(known.solution)
        return other

    def best_known(self, budget: int) -> Answer:
        """The best of everything that was simulated so far, for this budget."""
        return min(self._simulated.values(), key=lambda answer: answer.key(budget))

    def best_ones(self, budget: int, most: int) -> list[Answer]:
        """The same, the best first."""
        return heapq.nsmallest(most, self._simulated.values(), key=lambda answer: answer.key(budget))

    def simulate(self, solution: Solution) -> Answer:
        """A solution and the step it comes to, simulated once; as it was measured, where it was."""
        solution = self._as_allowed(solution)
        answer = self._simulated.get(solution)
        if answer is None:
            step = self.simulator.simulate(solution.choices, solution.settings)
            if solution in self._measured:
                step = with_measured(step, self._measured[solution])
            self._simulated[solution] = answer = Answer(solution, step)
        return answer

    def measured(self, solution: Solution) -> MeasuredStep | None:
        """What it came to; None where it was not tried."""
        return self._measured.get(self._as_allowed(solution))

    def add_measured(self, solution: Solution, measured: MeasuredStep) -> None:
        """A solution that was tried: from here on it comes to what was measured, also with other corrections."""
        solution = self._as_allowed(solution)
        self._measured[solution] = measured
        self._simulated.pop(solution, None)

    def _as_allowed(self, solution: Solution) -> Solution:
        """With one fate for a module that a step calls twice, and no more graphs of compiled blocks than there may be."""
        choices = solution.choices
        if self._tied is not None:
            choices = tuple(LEFT_ALONE if first is None else choices[first] for first in self._tied)
        if self._limit is not None:
            choices = self._limit.applied(choices)
        return solution if choices is solution.choices else Solution(choices, solution.settings)

    def _is_spent(self) -> bool:
        return self.simulator.cost >= self._stop_at

    def untouched(self) -> Answer:
        """The step left alone."""
        return self.simulate(Solution((LEFT_ALONE,) * len(self.profile.blocks), self.profile.engine))

    def solve(self, budget: int, *, near: Iterable[Answer] = (), effort: float = 1.0, stream: int = 0) -> Answer:
        """The best answer found; it may not fit, then it is the smallest peak found.

        ``stream``: searches with another one begin at other starts and leave their answers by other moves.
        """
        alone = self.untouched()
        if alone.step.peak_bytes <= budget:
            return alone
        self._stop_at = self.simulator.cost + int(MOST_EVENTS * effort)
        near = sorted(near, key=lambda answer: answer.key(budget))
        # Seeds are made once: those of another budget, and what was found from them, are starts for this one too.
        starts = list(self._simulated.values()) if self._has_seeds else self._seeds(budget)
        self._has_seeds = True
        starts.sort(key=lambda answer: answer.key(budget))
        best = starts[0]
        first = stream * self.pace.starts
        for start in _distinct([*near, *starts], first + max(self.pace.starts, len(near) + 1))[first:]:
            best = min(best, self._descend(start, budget), key=lambda answer: answer.key(budget))
        return self._polish(self._kick(best, budget, stream), budget)

    def smallest(self, *, effort: float = 1.0) -> Answer:
        """The smallest peak found, whatever it costs."""
        self._stop_at = self.simulator.cost + int(MOST_EVENTS * effort)
        starts = sorted(self._seeds(0), key=lambda answer: answer.key(0))
        return min((self._descend(start, 0) for start in _distinct(starts, 2)), key=lambda answer: answer.key(0))

    # ------------------------------------------------------------------ seeds

    def _seeds(self, budget: int) -> list[Answer]:
        found: list[tuple[Answer, int, int]] = []
        for cut in range(max(len(analysis.kind.cuts) for analysis in self.space.analyses)):
            slots = self._ordered(cut)
            for count in _spread(len(slots), _SWAP_COUNTS):
                settings = self._settings(slots[:count])[0]
                found.append((self._fill(slots, count, cut, Fate.SWAP, settings, budget), cut, count))
        best = sorted(found, key=lambda row: row[0].key(budget))[:3]
        answers = [answer for answer, _, _ in found]
        answers += [self.simulate(Solution(choices, self.profile.engine)) for choices in self.by_hand.values()]
        for _, cut, count in best:
            slots = self._ordered(cut)
            for settings in self._settings(slots[:count]):
                for inputs in (Fate.SWAP, Fate.SAVE):
                    answers.append(self._fill(slots, count, cut, inputs, settings, budget))
        return answers

    def _ordered(self, cut: int) -> list[Slot]:
        """The slots of all kinds, those first that spare most seconds for a byte."""
        slots = [slot for kind in self.space.rows for slot in self.space.by_density(kind, self._cut_of(kind, cut))]
        return sorted(slots, key=lambda slot: -slot.density)

    def _cut_of(self, kind: int, cut: int) -> int:
        return min(cut, len(self.space.analyses[kind].kind.cuts) - 1)

    def _settings(self, swapped: Sequence[Slot]) -> list[EngineSettings]:
        given = self.profile.engine
        if not given.is_tunable:
            return [given]
        region, largest = self.space.region_bytes(swapped), self.space.largest
        return [
            given,
            dataclasses.replace(given, window_bytes=largest, tail_bytes=0, prefetch_bytes=region),
            dataclasses.replace(given, window_bytes=2 * region, tail_bytes=region, prefetch_bytes=region),
        ]

    def _fill(
        self, slots: Sequence[Slot], count: int, cut: int, inputs: Fate, settings: EngineSettings, budget: int
    ) -> Answer:
        """The first ``count`` slots leave everywhere; of the rest as many are saved as fit."""
        base: list[Choice] = []
        for block in self.profile.blocks:
            choice = self.space.plain(block.kind, self._cut_of(block.kind, cut), inputs=inputs)
            for slot in slots[:count]:
                if slot.kind == block.kind:
                    fate = Fate.SWAP if Fate.SWAP in self.space.may_be(slot) else Fate.SAVE
                    choice = with_fate(choice, slot, fate)
            base.append(choice)
        items = [(slot, at) for slot in slots[count:] for at in reversed(self.space.rows[slot.kind])]

        def with_saves(number: int) -> Answer:
            choices = list(base)
            for slot, at in items[:number]:
                choices[at] = with_fate(choices[at], slot, Fate.SAVE)
            return self.simulate(Solution(tuple(choices), settings))

        best = with_saves(0)
        low, high = 0, len(items)
        while low < high and best.step.peak_bytes <= budget:
            middle = (low + high + 1) // 2
            answer = with_saves(middle)
            if answer.step.peak_bytes <= budget:
                low, best = middle, min(best, answer, key=lambda each: each.key(budget))
            else:
                high = middle - 1
        return best

    # ------------------------------------------------------------------ search

    def _kick(self, best: Answer, budget: int, stream: int) -> Answer:
        """Leave the best answer by a few moves at random and descend again, until that no longer helps."""
        dice = random.Random(stream)
        misses = 0
        while misses < self.pace.misses and not self._is_spent():
            solution = best.solution
            if self.space.is_short and misses % 2:
                solution = self.space.random(dice, solution.settings)
            for _ in range(self.pace.kick):
                solution = dice.choice(list(self.space.moves(solution, dice.choice((1, 2, 4)))))(solution)
            answer = self._descend(self.simulate(solution), budget, step=2)
            misses += 1
            if answer.key(budget) < best.key(budget):
                best, misses = answer, 0
        return best

    def _polish(self, best: Answer, budget: int) -> Answer:
        """In short rows any two blocks may change at once."""
        is_better = self.space.is_short
        while is_better and not self._is_spent():
            is_better = False
            for solution in self.space.two_blocks(best.solution):
                if self._is_spent():
                    break
                answer = self.simulate(solution)
                if answer.key(budget) < best.key(budget):
                    best, is_better = answer, True
        return best

    def _descend(self, answer: Answer, budget: int, *, step: int | None = None) -> Answer:
        if step is None:
            step = max(1, max(map(len, self.space.rows.values())) // 4)
        while not self._is_spent():
            better = self._sweep(answer, budget, step)
            if better is None and step == 1:
                break
            if better is None:
                step = max(1, step // 2)
            else:
                answer = better
        return answer

    def _sweep(self, answer: Answer, budget: int, step: int) -> Answer | None:
        """Every move once, each from the best so far; then pairs. None: nothing is better."""
        start = answer
        tried: list[tuple[Answer, Move]] = []
        for move in self.space.moves(answer.solution, step):
            if self._is_spent():
                break
            solution = move(answer.solution)
            if solution == answer.solution:
                continue
            other = self.simulate(solution)
            if other.key(budget) < answer.key(budget):
                answer = other
            else:
                tried.append((other, move))
        if answer is not start:
            return answer
        return self._pair(answer, budget, tried)

    def _pair(self, answer: Answer, budget: int, tried: Sequence[tuple[Answer, Move]]) -> Answer | None:
        """Two moves that are good only together; the most promising sums first."""
        fits = answer.step.peak_bytes <= budget
        sums = self._sums_of_gains(answer, budget, tried) if fits else self._sums_of_peaks(answer, tried)
        for _, first, second in heapq.nsmallest(self.pace.pairs, sums):
            if self._is_spent():
                return None
            both = self.simulate(tried[second][1](tried[first][1](answer.solution)))
            if both.key(budget) < answer.key(budget):
                return both
        return None

    @staticmethod
    def _sums_of_gains(
        answer: Answer, budget: int, tried: Sequence[tuple[Answer, Move]]
    ) -> Iterator[tuple[float, int, int]]:
        """A gain that does not fit, with a move that gives memory back; half of what is missing is enough."""
        now = answer.step.peak_bytes
        savings = [(at, other) for at, (other, _) in enumerate(tried) if other.step.peak_bytes < now]
        for first, (gain, _) in enumerate(tried):
            needed = 0.5 * (gain.step.peak_bytes - budget)
            if gain.score < answer.score:
                for second, saving in savings:
                    seconds = gain.score + saving.score - 2 * answer.score
                    if seconds < 0 and now - saving.step.peak_bytes >= needed:
                        yield seconds, first, second

    @staticmethod
    def _sums_of_peaks(answer: Answer, tried: Sequence[tuple[Answer, Move]]) -> Iterator[tuple[float, int, int]]:
        """Where two moments are the peak, each needs its own move."""
        flat = [(at, other) for at, (other, _) in enumerate(tried) if other.score != answer.score]
        for (first, one), (second, other) in itertools.combinations(flat, 2):
            yield one.step.peak_bytes + other.step.peak_bytes, first, second


def with_measured(step: SimulatedStep, measured: MeasuredStep) -> SimulatedStep:
    """A simulated step with the peak and the seconds that were measured; a difference in bytes is not explained."""
    parts = list(step.peak_parts)
    if parts:
        parts[UNEXPLAINED] += measured.peak_bytes - step.peak_bytes
    seconds = step.step_seconds if measured.step_seconds is None else measured.step_seconds
    return dataclasses.replace(step, peak_bytes=measured.peak_bytes, peak_parts=tuple(parts), step_seconds=seconds)


def _tied(blocks: Sequence[Block]) -> list[int | None] | None:
    """A module that a step calls twice has one fate: that of its first call; none at all where its calls differ in kind."""
    if len({block.name for block in blocks}) == len(blocks):
        return None
    first: dict[str, int] = {}
    kinds: dict[str, set[int]] = {}
    for at, block in enumerate(blocks):
        first.setdefault(block.name, at)
        kinds.setdefault(block.name, set()).add(block.kind)
    return [first[block.name] if len(kinds[block.name]) == 1 else None for block in blocks]


def _spread(count: int, most: int) -> Iterator[int]:
    """0 .. count, at most ``most`` of them, evenly."""
    seen = set()
    for index in range(min(count, most - 1) + 1):
        value = round(index * count / max(1, min(count, most - 1)))
        if value not in seen:
            seen.add(value)
            yield value


def _distinct(answers: Iterable[Answer], most: int) -> list[Answer]:
    found: dict[Solution, Answer] = {}
    for answer in answers:
        found.setdefault(answer.solution, answer)
    return list(found.values())[:most]
