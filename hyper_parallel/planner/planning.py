"""``plan_memory``: a profile and a budget in, a plan with its reasons out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import Choice
from hyper_parallel.planner.budget import parse_budget
from hyper_parallel.planner.plan import BlockPlan, Corrections, OpDecision, Plan, Recipe, RegionPlan, WhatIf
from hyper_parallel.planner.profile import BaseBytes, CutRegion, EngineSettings, OpProfile, Profile
from hyper_parallel.planner.solve import Answer, Solver
from hyper_parallel.planner.step_simulator import StepSimulator
from hyper_parallel.records.prediction import Prediction

__all__ = ["plan_memory", "predict", "untouched_prediction", "written_plan"]

_WHAT_IF: Final = (0.9, 1.1)
_SECOND_LOOK: Final = 0.25  # of the first search's effort


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
    if corrections is None:
        corrections = _calibrated(profile, budget_bytes)
    solver = Solver(StepSimulator(profile, corrections))
    answer = solver.solve(budget_bytes, effort=effort)
    if answer.step.peak_bytes > budget_bytes:
        answer = min(answer, solver.smallest(effort=effort), key=lambda each: each.key(budget_bytes))
        if answer.step.peak_bytes > budget_bytes:
            raise _too_small(profile, solver, answer, budget_bytes)
    others = [_at(solver, answer, int(budget_bytes * factor), effort) for factor in _WHAT_IF]
    # What a little less or more memory leads to is often a good place to start from.
    answer = solver.solve(budget_bytes, near=[answer, *others], effort=_SECOND_LOOK * effort)
    what_if = tuple(_as_what_if(answer, other, int(budget_bytes * share)) for other, share in zip(others, _WHAT_IF))
    plan = written_plan(solver, answer, budget_bytes, what_if=what_if)
    return dataclasses.replace(plan, inputs=profile.inputs)


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
        predicted=_prediction(solver, answer),
        untouched=untouched_prediction(solver),
        what_if=what_if,
        corrections=solver.simulator.corrections,
        notes=_notes(profile, answer),
    )


def _calibrated(profile: Profile, budget: int) -> Corrections:
    """Make the step left alone come out as it was measured.

    Bytes that the simulator does not explain are added to every peak; bytes that it only imagines stay as a margin, unless
    the measured step fits: then it fits. Time is scaled, unless the host decides how long the step takes.
    """
    if profile.measured.under != "none":
        return Corrections()
    simulator = StepSimulator(profile)
    alone = Solver(simulator).untouched().step
    is_host_bound = profile.host.step_seconds >= 0.95 * profile.measured.step_seconds
    scale = 1.0
    if alone.compute_seconds > 0 and profile.measured.step_seconds > 0 and not is_host_bound:
        scale = min(max(profile.measured.step_seconds / alone.compute_seconds, 0.5), 2.0)
    unexplained = profile.measured.peak_bytes - alone.peak_bytes
    fits = profile.measured.peak_bytes <= budget
    return Corrections(peak_bytes=unexplained if fits else max(0, unexplained), time_scale=scale)


def _prediction(solver: Solver, answer: Answer) -> Prediction:
    return predict(solver, answer.solution.choices, answer.solution.settings)


def untouched_prediction(solver: Solver) -> Prediction:
    """The step left alone."""
    return _prediction(solver, solver.untouched())


def predict(solver: Solver, choices: tuple[Choice, ...], settings: EngineSettings) -> Prediction:
    """What a step with these choices should be."""
    step = solver.simulator.explain(choices, settings)
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
    )


def _at(solver: Solver, answer: Answer, budget: int, effort: float) -> Answer:
    """The answer at another budget, searched from this one."""
    return solver.solve(budget, near=[answer], effort=_SECOND_LOOK * effort)


def _as_what_if(answer: Answer, other: Answer, budget: int) -> WhatIf:
    step = min(answer, other, key=lambda each: each.key(budget)).step
    if step.peak_bytes > budget:
        return WhatIf(budget_bytes=budget, peak_bytes=None, step_seconds=None)
    return WhatIf(budget_bytes=budget, peak_bytes=step.peak_bytes, step_seconds=step.step_seconds)


def _too_small(profile: Profile, solver: Solver, answer: Answer, budget: int) -> BudgetTooSmallError:
    prediction = _prediction(solver, answer)
    base = {
        field.name: getattr(profile.base, field.name)
        for field in dataclasses.fields(BaseBytes)
        if getattr(profile.base, field.name)
    }
    parts = {name: size for name, size in prediction.peak_parts.items() if name != "base"}
    made_of = ", ".join(f"{name} {show_bytes(size)}" for name, size in [*base.items(), *parts.items()])
    error = BudgetTooSmallError(
        f"plan_memory: {show_bytes(budget)} cannot hold this step; the smallest peak found is "
        f"{show_bytes(prediction.peak_bytes)}, at the {prediction.peak_where} ({made_of}). "
        "Raise the budget, or shorten the sequence or the batch."
    )
    error.smallest_peak_bytes = prediction.peak_bytes
    return error


def _notes(profile: Profile, answer: Answer) -> tuple[str, ...]:
    notes = []
    margin = profile.measured.reserved_bytes - profile.measured.peak_bytes
    if margin > 0:
        notes.append(f"the allocator reserved {show_bytes(margin)} beyond the active bytes when this was profiled")
    pinned = answer.step.host_bytes
    if pinned and profile.link.pin_seconds_per_byte:
        seconds = pinned * profile.link.pin_seconds_per_byte
        notes.append(f"pinning {show_bytes(pinned)} of host memory takes {seconds:.1f} s, once")
    return tuple(notes)


# ---------------------------------------------------------------------- writing it down


def _written(profile: Profile, answer: Answer) -> tuple[tuple[BlockPlan, ...], tuple[Recipe, ...]]:
    recipes: dict[Recipe, int] = {}
    blocks = []
    is_all_alone = all(choice.cut < 0 for choice in answer.solution.choices)
    for at, (block, choice) in enumerate(zip(profile.blocks, answer.solution.choices)):
        if choice.cut < 0:
            reason = "the step fits" if is_all_alone else "its memory is free again before the peak, or fits beside it"
            blocks.append(BlockPlan(name=block.name, reason=reason))
            continue
        recipe = _recipe(profile, at, choice)
        number = recipes.setdefault(recipe, len(recipes))
        blocks.append(BlockPlan(name=block.name, recipe=number, reason=_block_reason(recipe)))
    return tuple(blocks), tuple(recipes)


def _block_reason(recipe: Recipe) -> str:
    counts = Counter(op.fate for region in recipe.regions for op in region.ops)
    inputs = Counter(region.input_fate for region in recipe.regions)
    words = [f"{counts[fate]} {word}" for fate, word in _WORDS.items() if counts[fate]]
    swapped = f", {inputs[Fate.SWAP]} of {len(recipe.regions)} inputs swapped" if inputs[Fate.SWAP] else ""
    return (
        f"replayed in {len(recipe.regions)} region{'s' * (len(recipe.regions) > 1)}; ops: {', '.join(words)}{swapped}"
    )


_WORDS: Final = {Fate.SAVE: "saved", Fate.SWAP: "swapped", Fate.RECOMPUTE: "made again"}


def _recipe(profile: Profile, block: int, choice: Choice) -> Recipe:
    kind = profile.kind_of(block)
    regions = []
    for number, region in enumerate(kind.cuts[choice.cut].regions):
        regions.append(
            RegionPlan(
                module=region.module,
                input_fate=_input_fate(profile, block, region, choice.inputs[number]),
                ops=_decisions(profile, kind.ops, region, choice.fates),
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


def _decisions(
    profile: Profile, ops: Sequence[OpProfile], region: CutRegion, fates: Sequence[Fate]
) -> tuple[OpDecision, ...]:
    before = Counter((op.name, op.overload) for op in ops[: region.first_op])
    found = []
    for at in range(region.first_op, region.stop_op):
        op = ops[at]
        if op.is_keepable and op.output_bytes:
            found.append(
                OpDecision(
                    name=op.name,
                    overload=op.overload,
                    module=op.module,
                    occurrence=op.occurrence - before[op.name, op.overload],
                    fate=fates[at],
                    reason=_reason(op, fates[at]),
                )
            )
    return tuple(found)


def _reason(op: OpProfile, fate: Fate) -> str:
    price = f"{op.seconds * 1e3:.3f} ms to make again, {show_bytes(op.output_bytes)}"
    gib_price = op.seconds * 1e3 / (op.output_bytes / 2**30)
    if fate is Fate.RECOMPUTE:
        return f"{price}: {gib_price:.2f} ms for a GiB is cheaper than keeping it here"
    if fate is Fate.SWAP:
        return f"{price}: it leaves while forward runs and is back before its replay"
    return f"{price}: {gib_price:.2f} ms for a GiB is worth its memory here"
