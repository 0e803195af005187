"""From a budget to a model that keeps it: profile, plan, apply, measure, and plan again with what was measured.

A prediction is only as good as its last measurement. After a plan was applied a few steps are measured; where peak or time
miss the prediction, the difference is fed back and the plan is made again. What a person would try by hand (every block
recomputed, the same with inputs swapped, the presets) is measured as well, unless its prediction rules it out: the answer is
never slower than what was measured by more than 1 %, and no budget is refused that recomputing or swapping whole blocks was
measured to keep. The plan that is answered predicts what was measured of it. In a distributed run every rank measures, the
worst decides, and all apply the same plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import ActivationError, BudgetTooSmallError, FarMemoryError, PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.backend import AppliedPlan, Model, Step, planner_backend
from hyper_parallel.planner.budget import agreed_budget, check_budget, is_share
from hyper_parallel.planner.plan import Corrections, Plan
from hyper_parallel.planner.plan_store import PlanStore, Store, fit_with_store
from hyper_parallel.planner.planning import Planning
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.simple_plans import SWAPPED, SimplePlan, as_measured, simple_plan, simple_plans
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["apply_plan", "fit_memory", "profile_memory", "worst_of"]

_BEYOND: Final = 1.05  # what a step that ran out of memory counts as, over what it should have taken
_AS_FAST: Final = 1.005
_MUCH_FASTER: Final = 1.01  # a simple plan that is this much faster takes the place of a searched one
_CLEARLY: Final = 1.1  # a simple plan that is predicted to be this much slower or larger is not measured
_MOST_IN_VAIN: Final = 2
_SIMULATED: Final = "simulated accelerator"

Result = TypeVar("Result")


class World(Protocol):
    """The ranks of a distributed run."""

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on every rank."""


class _OneProcess:
    """A run of one process."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        """See :class:`World`."""
        return [value]


def profile_memory(model: Model, step: Step, *, blocks: str | Sequence[str] | None = None, steps: int = 3) -> Profile:
    """Run ``step`` a few times and write down what it is made of.

    Args:
        model: a model with repeated blocks, on the device that the plan is for.
        step: a callable that runs one forward and backward of this model. It is run ten to fifteen times and leaves no trace:
            gradients, buffers, random state and module tree are as before, or the error says what changed.
        blocks: patterns of the modules to treat as blocks; None: the repeated ones are found.
        steps: how many steps are timed; medians are taken.

    Returns:
        A record that can be saved and loaded.

    Raises:
        PlanError: no repeated blocks, a step without a backward, a step that changes weights.
        BudgetTooSmallError: the step does not fit even with everything replayed and swapped.
    """
    return planner_backend().profile_memory(model, step, blocks=blocks, steps=steps)


def apply_plan(model: Model, plan: Plan, *, device_bytes: int | None = None) -> AppliedPlan:
    """Put a plan's regions into the model; blocks that the plan leaves alone are not touched at all.

    Args:
        model: the model that the plan was made for.
        plan: from ``plan_memory``, or ``Plan.load(path)``.
        device_bytes: while the device holds less than this in all, compute does not wait for copies (see ``SwapConfig``).

    Returns:
        What was applied: a context manager with ``stats()``, ``report(path)`` and ``remove()``.

    Raises:
        PlanError: the plan was made for another model, or something is applied already.
    """
    return planner_backend().apply_plan(model, plan, device_bytes=device_bytes)


def fit_memory(
    model: Model,
    step: Step,
    budget: int | str,
    *,
    blocks: str | Sequence[str] | None = None,
    profile: Profile | None = None,
    plan: Plan | None = None,
    tolerance: float = 0.03,
    attempts: int = 5,
    steps: int = 3,
    store: Store = None,
) -> AppliedPlan:
    """Make ``step`` keep a memory budget: profile, plan, apply, measure, and correct until prediction and truth agree.

    Args:
        model: a model with repeated blocks.
        step: a callable that runs one forward and backward; trial runs leave no trace.
        budget: ``"20GiB"`` or bytes: the peak of this process's active bytes on the device, weights, gradients and all.
            ``"90%"``: that share of what the device can give to this process: what the driver reports as free, and what
            this process's allocator holds; what other processes use is left out. ``"auto"``: 90 % of it, less the
            optimizer states that the first optimizer step will make; the other 10 % are for fragmentation. In a
            distributed run the rank with the least decides.
        blocks: patterns of the modules to treat as blocks; None: the repeated ones are found.
        profile: one of this model that was made before; None: it is made now.
        plan: one to begin with, made from that profile; None: it is made now.
        tolerance: how far measured and predicted may lie apart before the plan is made again.
        attempts: how many plans are tried at most; two in a row that are no faster end it sooner.
        steps: how many steps are timed each time.
        store: a folder of plans that were fitted before, True for one in the user's cache, None for no store. Where the
            model, the shapes, the device, the releases, the settings and the budget are those of a plan in it, one step is
            run to see that, the plan is applied, and nothing is planned. Not asked where ``profile`` or ``plan`` is given.

    Returns:
        The applied plan: ``stats()``, ``report(path)``, ``remove()``, ``plan``. When the step fits, nothing is applied.

    Raises:
        BudgetTooSmallError: nothing fits; names the smallest peak found and what it is made of.
    """
    check_budget(budget)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise ValueError(f"fit_memory: tolerance is a share between 0 and 1, such as 0.03; got {tolerance!r}")
    for name, value in (("attempts", attempts), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"fit_memory: {name} is a whole number, 1 or more; got {value!r}")
    for given, kind in ((profile, Profile), (plan, Plan)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"fit_memory: expected a {kind.__name__}, got {type(given).__name__}")
    plans = PlanStore.of(store)
    backend = planner_backend()
    limit = agreed_budget(budget, lambda: backend.device_memory(model, who="fit_memory"), backend.world())
    fit = _Fit(model, step, limit, blocks, profile, float(tolerance), attempts, steps)
    fit.first_plan = plan
    if plans is None or profile is not None or plan is not None:
        return fit.run()
    question = (
        f"budget: {str(budget).strip().lower() if is_share(budget) else limit}",
        f"blocks: {blocks!r}",
        f"search: tolerance {tolerance}, attempts {attempts}, steps {steps}",
    )
    return fit_with_store(
        plans, backend, model, step, blocks=blocks, budget_bytes=limit, question=question, search=fit.run
    )


class _Fit:
    """One search for a plan that holds."""

    def __init__(
        self,
        model: Model,
        step: Step,
        budget: int,
        blocks: str | Sequence[str] | None,
        profile: Profile | None,
        tolerance: float,
        attempts: int,
        steps: int,
    ) -> None:
        self.model = model
        self.step = step
        self.budget = budget
        self.blocks = blocks
        self.profile = profile
        self.tolerance = tolerance
        self.attempts = attempts
        self.steps = steps
        self.first_plan: Plan | None = None
        self.backend = planner_backend()
        self.world: World = self.backend.world() or _OneProcess()
        self.history: list[Mapping[str, Any]] = []
        self.misses = 0
        self.planning: Planning | None = None
        self.tried: set[Hashable] = set()  # the decisions of the searched plans that were measured

    def run(self) -> AppliedPlan:
        """Profile once, then plan and measure until they agree."""
        with self.backend.guarded(self.model, who="fit_memory"):
            profile = self._profile()
            plan, measured = self._search(profile)
        applied = self.backend.apply_plan(self.model, dataclasses.replace(plan, inputs=profile.inputs))
        applied.measured = measured
        applied.history = tuple(self.history)
        return applied

    def _profile(self) -> Profile:
        def profile() -> Profile:
            if self.profile is not None:
                return self.profile
            return self.backend.profile_memory(
                self.model,
                self.step,
                blocks=self.blocks,
                steps=self.steps,
                is_guarded=True,
                agrees=lambda here: all(self.world.gather(here)),
            )

        return worst_of(self._together(profile))

    def _search(self, profile: Profile) -> tuple[Plan, StepMeasure]:
        """The best searched plan that held, or a simple one that is faster or the only one that fits."""
        best, refusal = self._searched(profile)
        if best is not None and best[0].does_nothing:
            return best
        best = self._with_simple_plans(profile, best)
        if best is None:
            raise self._refused(profile, refusal)
        plan, measured = best
        if not self._agrees(plan, measured, profile):
            seconds = measured.step_seconds if _has_real_time(profile) else plan.predicted_step_seconds
            plan = as_measured(plan, profile, peak_bytes=measured.peak_bytes, step_seconds=seconds)
        return plan, measured

    def _searched(self, profile: Profile) -> tuple[tuple[Plan, StepMeasure] | None, BudgetTooSmallError | None]:
        corrections: Corrections | None = None
        best: tuple[Plan, StepMeasure] | None = None
        in_vain = 0  # plans in a row that fitted and were no faster
        for _ in range(self.attempts):
            plan = self._plan(profile, corrections)
            if isinstance(plan, BudgetTooSmallError):
                return best, plan
            if best is not None and _decisions_of(plan) in self.tried:
                if _decisions_of(plan) == _decisions_of(best[0]):
                    best = plan, best[1]  # the same plan, which now predicts what was measured of it
                break
            self.tried.add(_decisions_of(plan))
            measured = self._measure(plan)
            assert measured is not None, "only a simple plan may not run"
            self._add_to_history(plan, measured)
            if measured.peak_bytes <= self.budget:
                agrees = self._agrees(plan, measured, profile)
                # Of two that are as fast, the one whose prediction held.
                slack = 1.0 if not agrees else _AS_FAST if _has_real_time(profile) else float("inf")
                is_best = best is None or measured.step_seconds < slack * best[1].step_seconds
                if is_best:
                    best = plan, measured
                in_vain = 0 if is_best else in_vain + 1
                if agrees or in_vain == _MOST_IN_VAIN:
                    break
            corrections = self._learn(plan, measured, profile)
        return best, None

    def _with_simple_plans(
        self, profile: Profile, best: tuple[Plan, StepMeasure] | None
    ) -> tuple[Plan, StepMeasure] | None:
        """The better of what was found and of what a person would try by hand; measured peaks and times decide.

        A way that the prediction rules out is not tried. Swapping whole blocks, which is not predicted, is tried only where
        nothing else fits. Where time is simulated it decides nothing, and simple plans are tried only as long as nothing fits.
        """
        if self.budget < profile.base.total:
            return best  # weights, gradients and states alone are more, under any plan
        corrections = Corrections() if best is None else best[0].corrections
        # Steps that come out faster than predicted do so under any plan; a slower one may be the searched plan's own fault.
        scale = 1.0 if best is None else min(1.0, best[1].step_seconds / best[0].predicted_step_seconds)
        for way in simple_plans(profile):
            if best is not None and (way is SWAPPED or not _has_real_time(profile)):
                break
            plan = simple_plan(profile, self.budget, way, corrections)
            if _decisions_of(plan) in self.tried or self._is_ruled_out(plan, way, best, scale):
                continue
            measured = self._measure_simple(plan, best)
            if measured is None:
                continue
            scale = min(scale, measured.step_seconds / plan.predicted_step_seconds)
            missed = max(0, measured.peak_bytes - plan.predicted_peak_bytes)  # by the ways that follow too, likely
            corrections = dataclasses.replace(corrections, peak_bytes=corrections.peak_bytes + missed)
            plan = as_measured(
                plan, profile, peak_bytes=measured.peak_bytes, step_seconds=_finite(measured.step_seconds)
            )
            self._add_to_history(plan, measured, way=way)
            fits = measured.peak_bytes <= self.budget
            if fits and (best is None or _MUCH_FASTER * measured.step_seconds < best[1].step_seconds):
                best = plan, measured
        return best

    def _is_ruled_out(self, plan: Plan, way: SimplePlan, best: tuple[Plan, StepMeasure] | None, scale: float) -> bool:
        """Whether the prediction, with its seconds scaled, leaves no doubt that this plan is no better than what there is."""
        if best is None:
            # The smallest ones are always measured: what they come to is the answer, or a part of the refusal.
            return plan.predicted_peak_bytes > _BEYOND * self.budget and way.name.startswith("the preset")
        return (
            plan.predicted_peak_bytes > _CLEARLY * self.budget
            or plan.predicted_step_seconds * scale > _CLEARLY * best[1].step_seconds
        )

    def _measure_simple(self, plan: Plan, best: tuple[Plan, StepMeasure] | None) -> StepMeasure | None:
        """One step; where that promises to be better than what there is, as many as of any other plan."""
        measured = self._measure(plan, is_simple=True, steps=1)
        if measured is None or measured.peak_bytes > self.budget or self.steps == 1:
            return measured
        if best is not None and measured.step_seconds >= best[1].step_seconds:
            return measured
        return self._measure(plan, is_simple=True)

    def _refused(self, profile: Profile, refusal: BudgetTooSmallError | None) -> BudgetTooSmallError:
        """Names the smallest peak, measured or predicted, and what it is made of."""
        simple = [attempt for attempt in self.history if "way" in attempt]
        planned = [attempt for attempt in self.history if "way" not in attempt]
        measured = "".join(f"; {attempt['way']}: {attempt['measured_peak']}" for attempt in simple)
        if refusal is not None and not planned:
            least = min(simple, key=lambda attempt: int(attempt["measured_peak_bytes"]), default=None)
            predicted = refusal.smallest_peak_bytes
            if least is None or (predicted is not None and predicted <= least["measured_peak_bytes"]):
                error = BudgetTooSmallError(f"{refusal}{' Measured' + measured + '.' if measured else ''}")
                error.smallest_peak_bytes = predicted
                return error
            error = BudgetTooSmallError(
                f"fit_memory: {show_bytes(self.budget)} cannot hold this step; the smallest peak found is "
                f"{least['measured_peak']}, measured with {least['way']} ({_made_of(profile, least['measured_peak_bytes'])}). "
                "Raise the budget, or shorten the sequence or the batch."
            )
            error.smallest_peak_bytes = least["measured_peak_bytes"]
            return error
        peaks = ", ".join(str(attempt["measured_peak"]) for attempt in planned)
        lowest = min(attempt["measured_peak_bytes"] for attempt in self.history)
        error = BudgetTooSmallError(
            f"fit_memory: {show_bytes(self.budget)} was not kept in {len(planned)} attempts; measured were {peaks}{measured}, "
            f"at least {show_bytes(lowest - self.budget)} too many. Raise the budget, allow more attempts, or shorten the "
            "sequence."
        )
        error.smallest_peak_bytes = lowest
        return error

    # ------------------------------------------------------------------ all ranks

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """The result of every rank; where one failed, all raise."""
        result: Result | None = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # the other ranks wait for this rank's result
            failure = error
        rows = self.world.gather((result, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        failed = [(rank, text) for rank, (_, text) in enumerate(rows) if text is not None]
        if failed:
            raise PlanError(f"fit_memory: rank {failed[0][0]} failed, so this one stops too: {failed[0][1]}")
        return [row for row, _ in rows]

    def _plan(self, profile: Profile, corrections: Corrections | None) -> Plan | BudgetTooSmallError:
        """One plan for all ranks, made on the first; or why there is none, which all ranks learn alike."""

        def make() -> Plan | BudgetTooSmallError | None:
            if self.world.rank != 0:
                return None
            if corrections is None and self.first_plan is not None:
                return self.first_plan
            try:
                self.planning = self.planning or Planning(profile)
                return self.planning.plan(self.budget, corrections)
            except BudgetTooSmallError as error:
                return error

        plan = self._together(make)[0]
        assert plan is not None, "the first rank makes a plan or says why not"
        return plan

    def _measure(self, plan: Plan, *, is_simple: bool = False, steps: int | None = None) -> StepMeasure | None:
        """The worst rank's peak and time under a plan; None for a simple plan that cannot run on this model."""

        def apply_and_measure() -> StepMeasure | None:
            try:
                with self.backend.apply_plan(self.model, plan):
                    return self.backend.measure_step(self.model, self.step, steps=steps or self.steps, is_guarded=True)
            except (ActivationError, FarMemoryError):
                if not is_simple:
                    raise
                return None

        answers = self._together(apply_and_measure)
        rows = [answer for answer in answers if answer is not None]
        if len(rows) < len(answers):
            return None
        slowest = max(rows, key=lambda row: row.step_seconds)
        peak = max(row.peak_bytes for row in rows)
        if not all(row.is_complete for row in rows):
            peak = max(peak, round(_BEYOND * max(self.budget, plan.predicted_peak_bytes)))
        return dataclasses.replace(slowest, peak_bytes=peak)

    # ------------------------------------------------------------------ judging

    def _agrees(self, plan: Plan, measured: StepMeasure, profile: Profile) -> bool:
        if abs(measured.peak_bytes - plan.predicted_peak_bytes) > self.tolerance * plan.predicted_peak_bytes:
            return False
        if not _has_real_time(profile):
            return True
        return bool(
            abs(measured.step_seconds - plan.predicted_step_seconds) <= self.tolerance * plan.predicted_step_seconds
        )

    def _learn(self, plan: Plan, measured: StepMeasure, profile: Profile) -> Corrections:
        return plan.corrections.after(
            plan,
            measured_peak_bytes=measured.peak_bytes + self._margin(measured.peak_bytes - self.budget),
            measured_step_seconds=measured.step_seconds if _has_real_time(profile) else None,
        )

    def _margin(self, over_bytes: int) -> int:
        """Asked for just what was missing, the search may find it in its model alone, and miss again: then more is asked for."""
        if over_bytes <= 0:
            return 0
        self.misses += 1
        return 0 if self.misses == 1 else max(over_bytes, self.budget // 1000) << (self.misses - 2)

    def _add_to_history(self, plan: Plan, measured: StepMeasure, *, way: SimplePlan | None = None) -> None:
        self.history.append(
            {
                **({} if way is None else {"way": way.name}),
                "predicted_peak": show_bytes(plan.predicted_peak_bytes),
                "measured_peak": show_bytes(measured.peak_bytes),
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_peak_bytes": measured.peak_bytes,
                "predicted_step_seconds": plan.predicted_step_seconds,
                "measured_step_seconds": measured.step_seconds,
                "exposed_copy_seconds": measured.exposed_copy_seconds,
                "late_loads": measured.late_loads,
                "misses": measured.misses,
            }
        )


def _finite(seconds: float) -> float:
    """0 for a step that ran out of memory: its time is not known."""
    return seconds if math.isfinite(seconds) else 0.0


def _made_of(profile: Profile, peak_bytes: int) -> str:
    """A measured peak by its parts, which add up."""
    parts = {field.name: getattr(profile.base, field.name) for field in dataclasses.fields(profile.base)}
    parts["activations"] = max(0, peak_bytes - profile.base.total)
    return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)


def _has_real_time(profile: Profile) -> bool:
    """A simulated device's time is the host's, with all its noise; nothing is decided by it."""
    return profile.versions.device != _SIMULATED


def _decisions_of(plan: Plan) -> Hashable:
    """The decisions of a plan, without its reasons and predictions. What is not named is recomputed."""
    recipes = [
        tuple(
            (
                region.module,
                region.input_fate,
                region.is_replayed,
                tuple(
                    (op.name, op.overload, op.occurrence, op.fate) for op in region.ops if op.fate is not Fate.RECOMPUTE
                ),
            )
            for region in recipe.regions
        )
        for recipe in plan.recipes
    ]
    blocks = tuple((block.name, None if block.recipe is None else recipes[block.recipe]) for block in plan.blocks)
    return blocks, plan.settings


def worst_of(profiles: Sequence[Profile]) -> Profile:
    """One profile for all ranks: the one with the highest peak, with the slowest link and step and the least far memory."""
    prints = {profile.model_fingerprint for profile in profiles}
    if len(prints) > 1:
        raise PlanError(
            f"fit_memory: the ranks hold {len(prints)} different models ({', '.join(sorted(prints))}), and one plan cannot serve "
            "them. Profile, plan and apply on each rank separately (profile_memory, plan_memory, apply_plan)."
        )
    worst = max(profiles, key=lambda profile: profile.base.total + profile.measured.peak_bytes)
    return dataclasses.replace(
        worst,
        link=dataclasses.replace(
            worst.link,
            out_bytes_per_second=min(profile.link.out_bytes_per_second for profile in profiles),
            in_bytes_per_second=min(profile.link.in_bytes_per_second for profile in profiles),
        ),
        far=dataclasses.replace(worst.far, host_bytes=min(profile.far.host_bytes for profile in profiles)),
        measured=dataclasses.replace(
            worst.measured,
            step_seconds=max(profile.measured.step_seconds for profile in profiles),
            peak_bytes=max(profile.measured.peak_bytes for profile in profiles),
        ),
    )
