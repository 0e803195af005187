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
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final, TypeAlias, TypeVar, cast

from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.backend import AppliedPlan, Model, PlannerBackend, Step, planner_backend
from hyper_parallel.planner.budget import agreed_budget, check_budget, is_share
from hyper_parallel.planner.fit_progress import FitProgress
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.plan_choices import decisions_of
from hyper_parallel.planner.plan_store import PlanStore, Store, fit_with_store
from hyper_parallel.planner.plan_trials import BEYOND, PlanTrials
from hyper_parallel.planner.planning import Planning
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.ranks import OneProcess, World, together, worst_of
from hyper_parallel.planner.refusal import refused
from hyper_parallel.planner.search_workers import SearchWorkers, idle_cores
from hyper_parallel.planner.shared_link import measured_together, with_shared_rates
from hyper_parallel.planner.simple_plans import RECOMPUTED, SimplePlan, as_measured, simple_plan, simple_plans
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["apply_plan", "fit_memory", "fit_with_backend", "profile_memory", "worst_of"]

_AS_FAST: Final = 1.005
_MUCH_FASTER: Final = 1.01  # a simple plan that is this much faster takes the place of a searched one
_CLEARLY: Final = 1.1  # a simple plan that is predicted to be this much slower or larger is not measured
_LEAST_GAIN: Final = 0.005  # a plan that is predicted to be less faster than this is not worth a trial
_MOST_IN_VAIN: Final = 2
_AGAIN: Final = "the answer, applied anew"
_MOST_AGAIN: Final = 2
_SIMULATED: Final = "simulated accelerator"

Found: TypeAlias = tuple[Plan, StepMeasure]
Result = TypeVar("Result")


def profile_memory(model: Model, step: Step, *, blocks: str | Sequence[str] | None = None, steps: int = 3) -> Profile:
    """Run ``step`` a few times and write down what it is made of.

    Args:
        model: a model with repeated blocks, on the device that the plan is for.
        step: a callable that runs one forward and backward of this model. It is run ten to fifteen times and leaves no trace:
            gradients, buffers, random state and module tree are as before, or the error says what changed.
        blocks: patterns of the modules to treat as blocks; None: the repeated ones are found.
        steps: how many steps are timed at most, where each is short; medians are taken.

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
        steps: how many steps are timed each time, at most two where a step takes long.
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


def fit_with_backend(
    backend: PlannerBackend,
    model: Model,
    step: Step,
    budget_bytes: int,
    *,
    profile: Profile,
    plan: Plan,
    tolerance: float = 0.03,
    attempts: int,
    steps: int,
    clock: Callable[[], float],
) -> AppliedPlan:
    """``fit_memory`` where another backend than the platform's measures: resident memory in place of a device's.

    ``clock``: the one that the backend measures steps by; what the fit may take is counted by it too.
    """
    fit = _Fit(model, step, budget_bytes, None, profile, tolerance, attempts, steps, backend, clock)
    fit.first_plan = plan
    return fit.run()


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
        backend: PlannerBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
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
        self.backend = backend or planner_backend()
        self.world: World = self.backend.world() or OneProcess()
        self.trials = PlanTrials(self.backend, self.world, model, step, budget, steps)
        self.misses = 0
        self.margin_bytes = 0
        self.has_anchor = False
        self.planning: Planning | None = None
        self.tried: set[Hashable] = set()  # the decisions of the plans that were measured
        self.fitting: dict[Hashable, Found] = {}  # by decisions, those that kept the budget
        self.progress = FitProgress(is_first_rank=self.world.rank == 0, clock=clock)
        self.workers = SearchWorkers(idle_cores() if self.world.rank == 0 else 0)

    def run(self) -> AppliedPlan:
        """Profile once, then plan and measure until they agree."""
        with self.workers, self.progress, self.backend.guarded(self.model, who="fit_memory"):
            self.progress.say("measuring the step")
            profile = self._profile()
            self.trials.device_memory = profile.device_memory
            seconds = profile.measured.step_seconds if _has_real_time(profile) else None
            graphs = [kind.graph for kind in profile.kinds if kind.graph is not None]
            self.progress.set_step(seconds, compile_seconds=sum(graph.compile_seconds for graph in graphs))
            self.trials.set_step(seconds)
            plan, measured = self._search(profile)
        applied = self.backend.apply_plan(self.model, dataclasses.replace(plan, inputs=profile.inputs))
        applied.measured = measured
        applied.history = tuple(self.trials.history)
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

        mine = together(self.world, profile)[self.world.rank]
        return worst_of(together(self.world, lambda: self._with_shared_link(mine)))

    def _with_shared_link(self, profile: Profile) -> Profile:
        if isinstance(self.world, OneProcess):
            return profile
        rates = measured_together(self.world, self.backend.link_probe(self.model, who="fit_memory"))
        return profile if rates is None else dataclasses.replace(profile, link=with_shared_rates(profile.link, rates))

    def _search(self, profile: Profile) -> Found:
        """The best searched plan that held, or a simple one that is faster or the only one that fits."""
        best, refusal = self._searched(profile, None)
        if best is not None and best[0].does_nothing:
            return best
        measured_before = len(self.tried)
        best = self._with_simple_plans(profile, best)
        if best is None:
            raise refused(profile, self.budget, self.trials.history, refusal)
        if refusal is None and len(self.tried) > measured_before and _has_real_time(profile):
            best = self._searched(profile, best)[0] or best  # simple plans taught something too
        plan, measured = self._confirmed(profile, best)
        if not self._agrees(plan, measured, profile):
            seconds = measured.step_seconds if _has_real_time(profile) else plan.predicted_step_seconds
            plan = as_measured(plan, profile, peak_bytes=measured.peak_bytes, step_seconds=seconds)
        return plan, measured

    def _searched(self, profile: Profile, best: Found | None) -> tuple[Found | None, BudgetTooSmallError | None]:
        """Plan and measure, until the prediction holds, or no plan is predicted to be faster by more than predictions miss."""
        in_vain = 0  # plans in a row that fitted and were no faster
        while self.attempts > 0:
            plan = self._plan(profile, best)
            if isinstance(plan, BudgetTooSmallError):
                return best, plan
            if plan is None:
                break
            if best is not None and decisions_of(plan) in self.tried:
                if decisions_of(plan) == decisions_of(best[0]):
                    best = plan, best[1]  # the same plan, which now predicts what was measured of it
                break
            self.attempts -= 1
            self.progress.begin_trial()
            measured = self.trials.measure(plan)
            assert measured is not None, "only a simple plan may not run"
            self._learn(plan, measured, profile)
            if self.trials.is_under_budget(measured):
                self.fitting[decisions_of(plan)] = plan, measured
                agrees = self._agrees(plan, measured, profile)
                # Of two that are as fast, the one whose prediction held.
                slack = 1.0 if not agrees else _AS_FAST if _has_real_time(profile) else float("inf")
                is_best = best is None or measured.step_seconds < slack * best[1].step_seconds
                if is_best:
                    best = plan, measured
                in_vain = 0 if is_best else in_vain + 1
                if in_vain == _MOST_IN_VAIN:
                    self.attempts = 0
                if agrees:
                    break
            best = self._with_anchor(profile, best)
        return best, None

    def _with_simple_plans(self, profile: Profile, best: Found | None) -> Found | None:
        """The better of what was found and of what a person would try by hand; measured peaks and times decide.

        A way that the prediction rules out is not tried. Where time is simulated it decides nothing, and simple plans are
        tried only as long as nothing fits.
        """
        if self.budget < profile.base.total:
            return best  # weights, gradients and states alone are more, under any plan
        for way in simple_plans(profile):
            if best is not None and not _has_real_time(profile):
                break
            plan, ratio = self._simple_plan(profile, way)
            if decisions_of(plan) not in self.tried and not self._is_ruled_out(plan, way, best, ratio):
                best = self._with_simple_plan(profile, plan, way, best)
        return best

    def _with_anchor(self, profile: Profile, best: Found | None) -> Found | None:
        """After a plan that missed its prediction: measure every block recomputed, unless its peak is predicted to be far above.

        A plan with swaps and regions that comes out slow does not say which of them was. One without a swap tells them apart.
        """
        does_nothing = best is not None and best[0].does_nothing
        if self.has_anchor or self.attempts == 0 or does_nothing or not _has_real_time(profile):
            return best
        self.has_anchor = True
        plan, _ = self._simple_plan(profile, RECOMPUTED)
        if decisions_of(plan) in self.tried or plan.predicted_peak_bytes > _CLEARLY * self.budget:
            return best
        return self._with_simple_plan(profile, plan, RECOMPUTED, best)

    def _with_simple_plan(self, profile: Profile, plan: Plan, way: SimplePlan, best: Found | None) -> Found | None:
        """Measure a simple plan; the better of it and of what there is."""
        self.progress.begin_trial()
        measured = self._measure_simple(plan, best)
        if measured is None:
            return best
        self._learn(plan, measured, profile, way=way)
        if not self.trials.is_under_budget(measured):
            return best
        seconds = _finite(measured.step_seconds)
        found = as_measured(plan, profile, peak_bytes=measured.peak_bytes, step_seconds=seconds), measured
        self.fitting[decisions_of(plan)] = found
        return best if best is not None and _MUCH_FASTER * measured.step_seconds >= best[1].step_seconds else found

    def _is_ruled_out(self, plan: Plan, way: SimplePlan, best: Found | None, ratio: float) -> bool:
        """Whether the prediction leaves no doubt that this plan is no better than what there is.

        ``ratio``: a plan came out this much faster than is predicted even now, so others may.
        """
        if best is None:
            # The smallest ones are always measured: what they come to is the answer, or a part of the refusal.
            return plan.predicted_peak_bytes > BEYOND * self.budget and way.name.startswith("the preset")
        return (
            plan.predicted_peak_bytes > _CLEARLY * self.budget
            or ratio * plan.predicted_step_seconds > _CLEARLY * best[1].step_seconds
        )

    def _measure_simple(self, plan: Plan, best: Found | None) -> StepMeasure | None:
        """One step; where that promises to be better than what there is, as many as of any other plan."""
        measured = self.trials.measure(plan, is_simple=True, steps=1)
        if measured is None or not self.trials.is_under_budget(measured) or self.steps == 1:
            return measured
        if best is not None and measured.step_seconds >= best[1].step_seconds:
            return measured
        return self.trials.measure(plan, is_simple=True)

    def _confirmed(self, profile: Profile, best: Found) -> Found:
        """The answer; where it swaps, applied anew and measured once more.

        What copies cost depends on the host memory that they get and on what ran before: a plan may be lucky in its trial. The
        slower time counts, and then another plan may be the fastest.
        """
        self.fitting[decisions_of(best[0])] = best
        for _ in range(_MOST_AGAIN):
            plan, measured = best
            if not plan.predicted.swapped_out_bytes or not _has_real_time(profile) or self._is_time_over(profile):
                break
            again = self.trials.measure(plan)
            assert again is not None, "it ran before"
            self.trials.add_to_history(plan, again, way=_AGAIN)
            del self.fitting[decisions_of(plan)]
            worse = dataclasses.replace(
                max(measured, again, key=lambda each: each.step_seconds),
                peak_bytes=max(measured.peak_bytes, again.peak_bytes),
                retries=again.retries,
            )
            if self.trials.is_under_budget(worse) or not self.fitting:
                self.fitting[decisions_of(plan)] = plan, worse
            best = min(self.fitting.values(), key=lambda found: found[1].step_seconds)
            if best[0] is plan:
                break
        return best

    # ------------------------------------------------------------------ planning, on the first rank

    def _on_first_rank(self, work: Callable[[Planning], Result], profile: Profile) -> Result:
        """What the first rank makes of it, on all ranks."""

        def make() -> Result | None:
            if self.world.rank != 0:
                return None
            self.planning = self.planning or Planning(profile, self.workers if _has_real_time(profile) else None)
            return work(self.planning)

        return cast(Result, together(self.world, make)[0])

    def _is_time_over(self, profile: Profile) -> bool:
        return self._on_first_rank(lambda _: self.progress.is_time_over(), profile)

    def _plan(self, profile: Profile, best: Found | None) -> Plan | BudgetTooSmallError | None:
        """One plan for all ranks; or why there is none; or None, where one more is not worth a trial."""

        def make(planning: Planning) -> Plan | BudgetTooSmallError | None:
            if best is None and self.first_plan is not None and not self.tried:
                return self.first_plan
            if best is not None and self.progress.is_time_over():
                return None
            self.progress.say("searching for a plan")
            try:
                plan = planning.plan(self.budget, margin_bytes=self.margin_bytes)
            except BudgetTooSmallError as error:
                return error
            if best is None or not _has_real_time(profile) or decisions_of(plan) in self.tried:
                return plan
            gain = best[1].step_seconds / plan.predicted_step_seconds - 1
            return plan if gain > max(_LEAST_GAIN, planning.error()) else None

        return self._on_first_rank(make, profile)

    def _simple_plan(self, profile: Profile, way: SimplePlan) -> tuple[Plan, float]:
        """The plan, and ``Planning.least_ratio``."""

        def make(planning: Planning) -> tuple[Plan, float]:
            return simple_plan(profile, self.budget, way, planning.solver(self.budget)), planning.least_ratio()

        return self._on_first_rank(make, profile)

    def _learn(self, plan: Plan, measured: StepMeasure, profile: Profile, *, way: SimplePlan | None = None) -> None:
        """Write down what a plan came to; the plans to come know of it."""
        self.tried.add(decisions_of(plan))
        self.trials.add_to_history(plan, measured, way=None if way is None else way.name)
        self.progress.say_measured(plan, measured)
        if way is None:
            self.margin_bytes = self._margin(self.trials.over_bytes(measured))
        has_real_time = _has_real_time(profile)
        self._on_first_rank(lambda planning: planning.learn(plan, measured, has_real_time=has_real_time), profile)

    # ------------------------------------------------------------------ judging

    def _agrees(self, plan: Plan, measured: StepMeasure, profile: Profile) -> bool:
        if abs(measured.peak_bytes - plan.predicted_peak_bytes) > self.tolerance * plan.predicted_peak_bytes:
            return False
        if not _has_real_time(profile):
            return True
        return bool(
            abs(measured.step_seconds - plan.predicted_step_seconds) <= self.tolerance * plan.predicted_step_seconds
        )

    def _margin(self, over_bytes: int) -> int:
        """Asked for just what was missing, the search may find it in its model alone, and miss again: then more is asked for."""
        if over_bytes <= 0:
            return 0
        self.misses += 1
        return 0 if self.misses == 1 else max(over_bytes, self.budget // 1000) << (self.misses - 2)


def _finite(seconds: float) -> float:
    """0 for a step that ran out of memory: its time is not known."""
    return seconds if math.isfinite(seconds) else 0.0


def _has_real_time(profile: Profile) -> bool:
    """A simulated device's time is the host's, with all its noise; nothing is decided by it."""
    return profile.versions.device != _SIMULATED
