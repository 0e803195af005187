"""``plan_memory``: a profile and a budget in, a plan with its reasons out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice, KindAnalysis
from hyper_parallel.planner.budget import parse_budget
from hyper_parallel.planner.calibration import Calibration
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.graph_limit import GraphLimit
from hyper_parallel.planner.peak_parts import parts_with_base, shown_parts
from hyper_parallel.planner.plan import BlockPlan, OpDecision, Plan, Recipe, RegionPlan, WhatIf
from hyper_parallel.planner.plan_choices import solution_of
from hyper_parallel.planner.profile import CutRegion, OpProfile, Profile
from hyper_parallel.planner.search_workers import SearchWorkers
from hyper_parallel.planner.solve import Answer, MeasuredStep, Solver, with_measured
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["Planning", "calibrated", "plan_memory", "prediction_of", "untouched_prediction", "written_plan"]

Search: TypeAlias = Callable[[Solver, int, float], Answer]  # (solver, budget, effort)

_WHAT_IF: Final = (0.9, 1.1)
_SECOND_LOOK: Final = 0.25  # of the first search's effort
_BESIDE: Final = 1.5  # what workers may take, over the effort of the search that they run beside
_KNOWN: Final = 3  # answers that they begin with


def plan_memory(
    profile: Profile, budget: int | str, *, corrections: Corrections | None = None, effort: float = 1.0
) -> Plan:
    """The fates that give the shortest step whose peak of active device bytes stays within ``budget``.

    Args:
        profile: What was measured; see ``profile_memory``.
        budget: ``"20GiB"``, ``"500MB"`` or bytes: everything on the device, weights and gradients included. Also
            ``"90%"`` or ``"auto"``: a share of what the device could give when the profile was made (see ``fit_memory``).
        corrections: What measuring an earlier plan taught, see ``Corrections.after``. None: taken from the measured step,
            where it was measured left alone.
        effort: How long to search. 1.0 takes a few seconds; the answer depends on it, never on the machine.

    Raises:
        BudgetTooSmallError: Nothing fits; the message names the smallest peak found and what it is made of.
    """
    if not isinstance(profile, Profile):
        raise TypeError(
            f"plan_memory: expected a Profile, got {profile!r}; make one with profile_memory, or Profile.load(path)"
        )
    budget_bytes = parse_budget(budget, name="plan_memory: budget", memory=lambda: profile.device_memory)
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 < effort <= 100:
        raise ValueError(f"plan_memory: effort is a number above 0 and up to 100, got {effort!r}")
    return Planning(profile).plan(budget_bytes, corrections, effort=effort)


class Planning:
    """Plans of one profile. What was found and measured before is where the next search starts."""

    def __init__(
        self,
        profile: Profile,
        workers: SearchWorkers | None = None,
        *,
        simulator: Callable[[Profile, Corrections], StepSimulator] = StepSimulator,
    ) -> None:
        self._profile = profile
        self._simulator = simulator
        self._workers = workers
        self._solver: Solver | None = None
        self._has_searched = False
        self._calibration: Calibration | None = None
        self._corrections: Corrections | None = None  # of the last plan, and what was measured since

    def plan(
        self, budget: int, corrections: Corrections | None = None, *, effort: float = 1.0, margin_bytes: int = 0
    ) -> Plan:
        """See ``plan_memory``. ``margin_bytes``: what the plan leaves free of the budget, in its own prediction."""
        asked = budget - margin_bytes
        if corrections is None:
            corrections = self._corrections or calibrated(self._profile, budget)
        solver = self._solver_with(corrections, asked)
        is_first, self._has_searched = not self._has_searched, True
        search, share = (self._first, 1.0) if is_first else (self._fitting, _SECOND_LOOK)
        if self._workers is None or solver.untouched().step.peak_bytes <= asked:
            answer = search(solver, asked, share * effort)
        else:
            answer = self._beside(self._workers, search, solver, asked, share * effort)
        plan = written_plan(solver, answer, budget, what_if=_what_if(solver, answer, budget))
        return dataclasses.replace(plan, inputs=self._profile.inputs)

    def _beside(self, workers: SearchWorkers, search: Search, solver: Solver, budget: int, effort: float) -> Answer:
        """The search, and those of the workers from other starting points; then once more from what all of them found."""
        known = [answer.solution for answer in solver.best_ones(budget, _KNOWN)]
        workers.begin(self._profile, solver.simulator.corrections, budget, effort=_BESIDE * effort, known=known)
        refusal = None
        try:
            search(solver, budget, effort)
        except BudgetTooSmallError as error:
            refusal = error
        near = [solver.simulate(solution) for solution in workers.collect()]
        best = solver.best_known(budget)
        if refusal is not None and best.step.peak_bytes > budget:
            raise refusal
        return solver.solve(budget, near=[best, *near], effort=_SECOND_LOOK * effort)

    def solver(self, budget: int) -> Solver:
        """A solver with everything that is known by now."""
        return self._solver_with(self._corrections or calibrated(self._profile, budget), budget)

    def _solver_with(self, corrections: Corrections, budget: int) -> Solver:
        if self._solver is None:
            self._solver = Solver(self._simulator(self._profile, corrections))
        elif corrections != self._solver.simulator.corrections:
            self._solver = self._solver.corrected(corrections, budget)
        self._corrections = corrections
        return self._solver

    def learn(self, plan: Plan, measured: StepMeasure, *, has_real_time: bool) -> None:
        """A plan was measured: the next one, and predictions of all others, know of it."""
        solver = self.solver(plan.budget_bytes)
        corrections = solver.simulator.corrections
        solution = solution_of(self._profile, plan)
        if solution is None:  # a plan without a simulation: nothing follows for others
            return
        seconds = measured.step_seconds if has_real_time and 0 < measured.step_seconds < math.inf else None
        is_known = measured.is_complete
        predicted = solver.simulator.simulate(*solution)
        corrections = corrections.with_peak(predicted.moments, measured.peak_bytes, measured.moments)
        if seconds is not None:
            if self._calibration is None:
                prior = calibrated(self._profile, plan.budget_bytes)
                self._calibration = Calibration(solver.simulator, prior)
                self._add_untouched(solver, self._calibration)
            self._calibration.add(solution, seconds)
            corrections = dataclasses.replace(self._calibration.corrections, moments=corrections.moments)
        if is_known:
            solver.add_measured(solution, MeasuredStep(measured.peak_bytes, seconds))
        self._corrections = corrections

    def _add_untouched(self, solver: Solver, calibration: Calibration) -> None:
        """The step left alone was measured too, for the profile."""
        measured = self._profile.measured
        if measured.under == "none" and measured.step_seconds > 0:
            calibration.add(solver.untouched().solution, measured.step_seconds)

    def error(self) -> float:
        """By how much predictions miss what was measured, as a share of the step; infinite before anything was."""
        ratios = [] if self._calibration is None else self._calibration.ratios()
        return math.sqrt(sum((ratio - 1) ** 2 for ratio in ratios) / len(ratios)) if ratios else math.inf

    def least_ratio(self) -> float:
        """The least of what was measured over what is predicted of it now; 1 where no plan was faster than predicted."""
        return 1.0 if self._calibration is None else min([1.0, *self._calibration.ratios()])

    def _first(self, solver: Solver, budget: int, effort: float) -> Answer:
        answer = self._fitting(solver, budget, effort)
        # What a little less or more memory leads to is often a good place to start from.
        others = [
            solver.solve(int(budget * factor), near=[answer], effort=_SECOND_LOOK * effort) for factor in _WHAT_IF
        ]
        return solver.solve(budget, near=[answer, *others], effort=_SECOND_LOOK * effort)

    def _fitting(self, solver: Solver, budget: int, effort: float) -> Answer:
        answer = solver.solve(budget, effort=effort)
        if answer.step.peak_bytes > budget:
            answer = min(answer, solver.smallest(effort=effort), key=lambda each: each.key(budget))
            if answer.step.peak_bytes > budget:
                raise _too_small(self._profile, solver, answer, budget)
        return answer


def written_plan(solver: Solver, answer: Answer, budget: int, *, what_if: tuple[WhatIf, ...] = ()) -> Plan:
    """An answer as a plan: every fate with its reason, and what it should come to."""
    profile = solver.profile
    blocks, recipes = _written(profile, answer)
    return Plan(
        model_fingerprint=profile.model_fingerprint,
        budget_bytes=budget,
        blocks=blocks,
        recipes=recipes,
        settings=answer.solution.settings,
        predicted=prediction_of(solver, answer),
        untouched=untouched_prediction(solver),
        what_if=what_if,
        corrections=solver.simulator.corrections,
        notes=_notes(profile, answer),
    )


def calibrated(profile: Profile, budget: int) -> Corrections:
    """Make the step left alone come out as it was measured.

    Bytes that the simulator does not explain are added to the peaks of their moment; bytes that it only imagines stay as a
    margin, unless the measured step fits: then it fits.
    """
    measured = profile.measured
    if measured.under != "none":
        return Corrections()
    alone = StepSimulator(profile).simulate((LEFT_ALONE,) * len(profile.blocks), profile.engine)
    scale = 1.0
    if alone.step_seconds > 0 and measured.step_seconds > 0:
        scale = measured.step_seconds / alone.step_seconds
    moments = Corrections().with_peak(alone.moments, measured.peak_bytes, measured.moments).moments
    if measured.peak_bytes > budget:
        moments = moments.joined(moments, lambda nbytes, _: max(0, nbytes))
    return Corrections.of_work(scale, moments=moments)


def untouched_prediction(solver: Solver) -> Prediction:
    """The step left alone."""
    return prediction_of(solver, solver.untouched())


def prediction_of(solver: Solver, answer: Answer) -> Prediction:
    """What an answer should come to, with the peak by its parts."""
    step = solver.simulator.explain(answer.solution.choices, answer.solution.settings)
    measured = solver.measured(answer.solution)
    if measured is not None:
        step = with_measured(step, measured)
    return Prediction(
        peak_bytes=step.peak_bytes,
        peak_where=step.peak_where,
        peak_parts=step.named_parts(),
        step_seconds=step.step_seconds,
        compute_seconds=step.compute_seconds,
        replay_seconds=step.replay_seconds,
        exposed_seconds=step.exposed_seconds,
        host_seconds=step.host_seconds,
        swapped_out_bytes=step.out_bytes,
        swapped_in_bytes=step.in_bytes,
        host_bytes=step.host_bytes,
        disk_bytes=step.disk_bytes,
        moments=step.moments,
    )


def _what_if(solver: Solver, answer: Answer, budget: int) -> tuple[WhatIf, ...]:
    """What is known to be possible with a little less or more memory."""
    found = []
    for factor in _WHAT_IF:
        other = int(budget * factor)
        step = min(answer, solver.best_known(other), key=lambda each: each.key(other)).step
        fits = step.peak_bytes <= other
        found.append(
            WhatIf(
                budget_bytes=other,
                peak_bytes=step.peak_bytes if fits else None,
                step_seconds=step.step_seconds if fits else None,
            )
        )
    return tuple(found)


def _too_small(profile: Profile, solver: Solver, answer: Answer, budget: int) -> BudgetTooSmallError:
    prediction = prediction_of(solver, answer)
    whole, made_of = shown_parts(prediction.peak_bytes, parts_with_base(profile, prediction.peak_parts))
    error = BudgetTooSmallError(
        f"plan_memory: {show_bytes(budget)} cannot hold this step; the smallest peak found is "
        f"{whole}, at the {prediction.peak_where} ({made_of}). "
        "Raise the budget, or shorten the sequence or the batch."
    )
    error.smallest_peak_bytes = prediction.peak_bytes
    return error


def _notes(profile: Profile, answer: Answer) -> tuple[str, ...]:
    notes = []
    margin = profile.measured.reserved_bytes - profile.measured.peak_bytes
    if margin > 0:
        notes.append(f"the allocator reserved {show_bytes(margin)} beyond the active bytes when this was profiled")
    link = profile.link
    if link.copying_ranks > 1:
        notes.append(
            f"with the {link.copying_ranks} ranks of this host copying at once, the link gives each "
            f"{show_bytes(link.out_bytes_per_second)}/s out and {show_bytes(link.in_bytes_per_second)}/s back; alone, "
            f"{show_bytes(link.lone_out_bytes_per_second)}/s and {show_bytes(link.lone_in_bytes_per_second)}/s"
        )
    pinned = answer.step.host_bytes
    if pinned and profile.link.pin_seconds_per_byte:
        seconds = pinned * profile.link.pin_seconds_per_byte
        notes.append(f"pinning {show_bytes(pinned)} of host memory takes {seconds:.1f} s, once")
    return (*notes, *_graph_notes(profile, answer))


def _graph_notes(profile: Profile, answer: Answer) -> list[str]:
    """How many graphs of compiled blocks the plan needs, and how long compiling them takes in a new process."""
    notes = []
    for number, graphs in GraphLimit(profile).graphs(answer.solution.choices).items():
        kind = profile.kinds[number]
        new = len(graphs.keys() - {None})
        assert kind.graph is not None, "the kind is compiled"
        if new:
            notes.append(
                f"{kind.name} is compiled in {new} graph{'s' * (new > 1)} of the plan"
                f"{', and as it is' if None in graphs else ''}: about {new * kind.graph.compile_seconds:.1f} s in each process"
            )
    return notes


# ---------------------------------------------------------------------- writing it down


def _written(profile: Profile, answer: Answer) -> tuple[tuple[BlockPlan, ...], tuple[Recipe, ...]]:
    recipes: dict[Recipe, int] = {}
    blocks = []
    is_all_alone = all(choice.cut < 0 for choice in answer.solution.choices)
    for at, (block, choice) in enumerate(zip(profile.blocks, answer.solution.choices)):
        is_compiled = profile.kind_of(at).graph is not None
        if choice.cut < 0:
            reason = "the step fits" if is_all_alone else "its memory is free again before the peak, or fits beside it"
            blocks.append(BlockPlan(name=block.name, reason=reason, is_compiled=is_compiled))
            continue
        recipe = _recipe(profile, at, choice)
        number = recipes.setdefault(recipe, len(recipes))
        blocks.append(BlockPlan(name=block.name, recipe=number, reason=_block_reason(recipe), is_compiled=is_compiled))
    return tuple(blocks), tuple(recipes)


def _block_reason(recipe: Recipe) -> str:
    counts = Counter(op.fate for region in recipe.regions for op in region.ops if op.is_needed)
    inputs = Counter(region.input_fate for region in recipe.regions)
    words = [f"{counts[fate]} {word}" for fate, word in _WORDS.items() if counts[fate]]
    swapped = f", {inputs[Fate.SWAP]} of {len(recipe.regions)} inputs swapped" if inputs[Fate.SWAP] else ""
    return (
        f"replayed in {len(recipe.regions)} region{'s' * (len(recipe.regions) > 1)}; ops: {', '.join(words)}{swapped}"
    )


_WORDS: Final = {Fate.SAVE: "saved", Fate.SWAP: "swapped", Fate.RECOMPUTE: "made again"}


def _recipe(profile: Profile, block: int, choice: Choice) -> Recipe:
    kind = profile.kind_of(block)
    analysis = KindAnalysis(kind)
    regions = []
    for number, region in enumerate(kind.cuts[choice.cut].regions):
        regions.append(
            RegionPlan(
                module=region.module,
                input_fate=_input_fate(profile, block, region, choice.inputs[number]),
                ops=_decisions(analysis, region, choice.fates),
            )
        )
    return Recipe(kind=kind.name, regions=tuple(regions))


def _input_fate(profile: Profile, block: int, region: CutRegion, fate: Fate) -> Fate:
    """An input that is held elsewhere anyway, or that is too small to move, need not leave."""
    ops, own = profile.kind_of(block).ops, profile.blocks[block].input_bytes
    held = 0
    for given in region.inputs:
        value = given
        while value >= 0 and (alias := ops[value].alias) is not None:
            value = alias
        held = max(held, own if value < 0 else ops[value].output_bytes)
    return fate if held >= max(1, profile.engine.min_bytes) else Fate.SAVE


def _decisions(analysis: KindAnalysis, region: CutRegion, fates: Sequence[Fate]) -> tuple[OpDecision, ...]:
    ops = analysis.kind.ops
    before = Counter((op.name, op.overload) for op in ops[: region.first_op])
    found = []
    for at in range(region.first_op, region.stop_op):
        op = ops[at]
        if op.is_keepable and op.output_bytes:
            is_needed = fates[at] is not Fate.RECOMPUTE or analysis.is_ever_replayed(region, at)
            found.append(
                OpDecision(
                    name=op.name,
                    overload=op.overload,
                    module=op.module,
                    occurrence=op.occurrence - before[op.name, op.overload],
                    fate=Fate.SAVE if op.runs_once and fates[at] is Fate.RECOMPUTE else fates[at],
                    reason=_reason(op) if is_needed else _NOT_NEEDED,
                    is_needed=is_needed,
                    price_ms_per_gib=_price_ms(op),
                    nbytes=op.output_bytes,
                )
            )
    return tuple(found)


_NOT_NEEDED: Final = "no backward reads it, so it is neither kept nor made again"


def _reason(op: OpProfile) -> str:
    """The one measure by which values are compared; the same sentence for every fate."""
    if op.runs_once:
        return "a collective, which is never run again"
    return f"making it again costs {_price_ms(op):,.0f} ms per GiB ({op.seconds * 1e3:.3f} ms, {show_bytes(op.output_bytes)})"


def _price_ms(op: OpProfile) -> float:
    return op.seconds * 1e3 / (op.output_bytes / 2**30)
