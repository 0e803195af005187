"""Plans for the stages of one rank of a pipeline: one budget, one search, and a plan for each stage.

Each stage was profiled with one micro-batch. The profiles become one profile of the rank, whose blocks are those of all its
stages; the search then simulates the rank's order of actions (see ``pipeline_simulator``). A rank makes its own step as short as
its memory allows. Ranks share no memory, so that is also what makes the slowest stage as fast as it can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.block_trace import LEFT_ALONE
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.pipeline_order import Action, ActionKind, Order, most_in_flight, shortened
from hyper_parallel.planner.pipeline_simulator import PipelineSimulator, PipelineStep, StagePart
from hyper_parallel.planner.plan import BlockPlan, Plan
from hyper_parallel.planner.plan_choices import solution_of
from hyper_parallel.planner.planning import Planning, calibrated
from hyper_parallel.planner.profile import BaseBytes, Block, BlockKind, Profile
from hyper_parallel.planner.step_simulator import SimulatedStep
from hyper_parallel.records.moments import MomentBytes
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.step_measure import StepMeasure

__all__ = ["RankPlan", "RankPlanning", "joined_profile"]

_EFFORT: Final = 1.0  # of a search: a step of a pipeline is several steps to simulate
_NOTHING: Final[Mapping[int, int]] = MappingProxyType({})
_MOST_FITTING: Final = 1024  # micro-batches; more are not counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank does with the activations of its stages."""

    stages: tuple[int, ...]
    plan: Plan  # of all stages; the names of its blocks begin with the stage
    of_stages: tuple[Plan, ...]  # the same, as each stage's model needs it
    most_in_flight: Mapping[int, int]  # by stage: micro-batches alive at one time
    fitting: int  # how many micro-batches of every stage would fit in the budget under this plan
    action_seconds: Mapping[Action, float]  # of the whole order

    @property
    def busy_seconds(self) -> float:
        """The rank's own work in one step, without what it waits for others."""
        return sum(self.action_seconds.values())

    def summary(self) -> str:
        """A line for each stage, and one for the rank's memory."""
        predicted, budget = self.plan.predicted, show_bytes(self.plan.budget_bytes)
        alive = ", ".join(f"stage {stage}: {count}" for stage, count in sorted(self.most_in_flight.items()))
        lines = [
            f"budget {budget}: peak {show_bytes(predicted.peak_bytes)}, left alone {show_bytes(self.plan.untouched.peak_bytes)}; "
            f"own work {predicted.step_seconds * 1e3:.1f} ms, left alone {self.plan.untouched.step_seconds * 1e3:.1f} ms",
            f"micro-batches in flight: {alive}; the budget holds {_counted(self.fitting)} of every stage under this plan",
        ]
        for stage, plan in zip(self.stages, self.of_stages):
            treated = "; ".join(f"{names}: {reason}" for names, reason in plan.treatments())
            lines.append(f"stage {stage}: {treated}")
        return "\n".join(lines)


def _counted(fitting: int) -> str:
    return f"{_MOST_FITTING} or more" if fitting >= _MOST_FITTING else str(fitting)


def joined_profile(
    profiles: Mapping[int, Profile], left_bytes: Mapping[int, int] = _NOTHING
) -> tuple[Profile, tuple[StagePart, ...]]:
    """One profile of a rank's stages, and where each stage is in it.

    Everything that lived on the device while a stage was profiled is in its base, the other stages' weights too.
    """
    first = next(iter(profiles.values()))
    kinds: list[BlockKind] = []
    blocks: list[Block] = []
    parts: list[StagePart] = []
    for stage, profile in sorted(profiles.items()):
        offset, start = len(kinds), len(blocks)
        kinds += profile.kinds
        blocks += [
            dataclasses.replace(block, name=f"{stage}:{block.name}", kind=block.kind + offset)
            for block in profile.blocks
        ]
        parts.append(
            StagePart(
                stage=stage,
                first_block=start,
                stop_block=len(blocks),
                prologue=profile.prologue,
                epilogue=profile.epilogue,
                left_bytes=left_bytes.get(stage, 0),
            )
        )
    own = [profile.base for profile in profiles.values()]
    weights, gradients, optimizer = (sum(getattr(base, name) for base in own) for name in _PARTS)
    whole = max(base.total for base in own)
    joined = dataclasses.replace(
        first,
        base=BaseBytes(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            other=max(0, whole - weights - gradients - optimizer),
        ),
        kinds=tuple(kinds),
        blocks=tuple(blocks),
        inputs=None,
    )
    return joined, tuple(parts)


_PARTS: Final = ("weights", "gradients", "optimizer")


class RankPlanning:
    """Plans for one rank; what was measured of one is known to the next."""

    def __init__(
        self,
        profiles: Mapping[int, Profile],
        order: Order,
        *,
        corrections: Corrections | None = None,
        left_bytes: Mapping[int, int] = _NOTHING,
        is_swap_allowed: bool = True,
    ) -> None:
        self._profiles = dict(sorted(profiles.items()))
        self.profile, self._parts = joined_profile(self._profiles, left_bytes)
        if not is_swap_allowed:
            engine = dataclasses.replace(self.profile.engine, min_bytes=2**62)
            self.profile = dataclasses.replace(self.profile, engine=engine)
        self.order = order
        self._short = shortened(order)
        self._planning = Planning(self.profile, simulator=self._short_simulator)
        self._corrections = corrections or _corrections_of(self._profiles.values())
        self._is_first = True

    def _short_simulator(self, profile: Profile, corrections: Corrections) -> PipelineSimulator:
        return PipelineSimulator(profile, self._parts, self._short, corrections)

    def plan(self, budget: int, *, margin_bytes: int = 0) -> RankPlan:
        """The shortest step of this rank whose peak stays within ``budget``.

        Raises:
            BudgetTooSmallError: nothing fits; names the rank's stages and the smallest peak found.
        """
        corrections = self._corrections if self._is_first else None
        self._is_first = False
        try:
            plan = self._planning.plan(budget, corrections, effort=_EFFORT, margin_bytes=margin_bytes)
        except BudgetTooSmallError as error:
            named = BudgetTooSmallError(f"{_named(self._profiles)}: {error}")
            named.smallest_peak_bytes = error.smallest_peak_bytes
            raise named from None
        return self.finished(plan)

    def untouched(self) -> PipelineStep:
        """The rank's step with nothing recomputed or swapped."""
        simulator = PipelineSimulator(self.profile, self._parts, self.order, self._corrections)
        return simulator.run_order((LEFT_ALONE,) * len(self.profile.blocks), self.profile.engine)

    def finished(self, plan: Plan) -> RankPlan:
        """A plan of the whole rank, by stage, with the seconds of the whole order."""
        solution = solution_of(self.profile, plan)
        assert solution is not None, "a plan of a search has a simulation"
        simulator = PipelineSimulator(self.profile, self._parts, self.order, plan.corrections)
        whole = simulator.run_order(*solution)
        alone = simulator.simulate((LEFT_ALONE,) * len(self.profile.blocks), self.profile.engine)
        plan = dataclasses.replace(
            plan,
            predicted=_with_seconds(plan.predicted, whole.step),
            untouched=_with_seconds(plan.untouched, alone),
            what_if=(),  # of the shortened order
        )
        return RankPlan(
            stages=tuple(self._profiles),
            plan=plan,
            of_stages=tuple(self._of_stage(plan, stage) for stage in self._profiles),
            most_in_flight=most_in_flight(self.order),
            fitting=self._fitting(solution, plan),
            action_seconds=whole.action_seconds,
        )

    def learn(self, plan: Plan, measured: StepMeasure) -> None:
        """What a plan came to on the device, for the plans to come. Seconds are not used: they hold waits for other ranks."""
        self._planning.learn(plan, measured, has_real_time=False)

    def _of_stage(self, plan: Plan, stage: int) -> Plan:
        """The blocks of one stage; what is predicted stays that of the rank."""
        prefix, profile = f"{stage}:", self._profiles[stage]
        used = {block.recipe for block in plan.blocks if block.name.startswith(prefix)} - {None}
        recipes = sorted(number for number in used if number is not None)
        blocks = [
            BlockPlan(
                name=block.name.removeprefix(prefix),
                recipe=None if block.recipe is None else recipes.index(block.recipe),
                reason=block.reason,
            )
            for block in plan.blocks
            if block.name.startswith(prefix)
        ]
        return dataclasses.replace(
            plan,
            model_fingerprint=profile.model_fingerprint,
            blocks=tuple(blocks),
            recipes=tuple(plan.recipes[number] for number in recipes),
            inputs=profile.inputs,
        )

    def _fitting(self, solution: Solution, plan: Plan) -> int:
        """The most micro-batches of every stage that could be alive at one time under this plan."""

        def fits(count: int) -> bool:
            order = _all_alive(tuple(self._profiles), count)
            simulator = PipelineSimulator(self.profile, self._parts, order, plan.corrections)
            return simulator.simulate(*solution).peak_bytes <= plan.budget_bytes

        low, high = 0, 1
        while high < _MOST_FITTING and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return max(low, 1 if high >= _MOST_FITTING else low)


def _with_seconds(prediction: Prediction, step: SimulatedStep) -> Prediction:
    """A prediction of a shortened order, with what the whole order takes."""
    return dataclasses.replace(
        prediction,
        step_seconds=step.step_seconds,
        compute_seconds=step.compute_seconds,
        replay_seconds=step.replay_seconds,
        exposed_seconds=step.exposed_seconds,
        swapped_out_bytes=step.out_bytes,
        swapped_in_bytes=step.in_bytes,
    )


def _all_alive(stages: Sequence[int], count: int) -> Order:
    forwards = [Action(ActionKind.FORWARD, stage, number) for number in range(count) for stage in stages]
    backwards = [Action(ActionKind.BACKWARD, stage, number) for number in range(count) for stage in reversed(stages)]
    return (*forwards, *backwards)


def _corrections_of(profiles: Collection[Profile]) -> Corrections:
    """Those of the stages' own profiles: seconds scaled as one, and the most bytes that a stage's simulation misses."""
    found = [calibrated(profile, 0) for profile in profiles]
    scale = sum(each.work_scale for each in found) / len(found)
    missed = max(max(each.moments) for each in found)
    return Corrections.of_work(scale, moments=MomentBytes(blocks_backward=max(0, missed)))


def _named(profiles: Mapping[int, Profile]) -> str:
    numbers = ", ".join(map(str, profiles))
    return f"stage{'s' * (len(profiles) > 1)} {numbers}"
