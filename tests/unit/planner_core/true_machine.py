"""A simulated machine that differs from its profile: what ``fit_memory`` is told is measured on it.

The profile is what was measured before planning; the machine has other seconds per op, host, link and wait, other bytes in
some moments, and noise. Both are made from a seed. Its answers come from the planner's own simulator, so what this shows is
how predictions converge, not whether the simulator is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

from hyper_parallel.planner.block_trace import LEFT_ALONE
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import BlockKind, EngineSettings, HostCost, Measured, Profile
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import SimulatedStep, StepSimulator
from hyper_parallel.records.step_measure import StepMeasure

from .solutions import solution_of
from .stack_profile import stack_profile


def host_bound(profile: Profile, *, layers: int, slow: float) -> Profile:
    """Fewer of the same blocks, run from tapes, on a host that takes ``slow`` times what the device takes."""
    kinds = tuple(
        dataclasses.replace(
            kind,
            runs_from_tape=True,
            host_forward_seconds=slow * sum(op.seconds for op in kind.ops),
            host_backward_seconds=0.6 * slow * kind.backward_seconds,
        )
        for kind in profile.kinds
    )
    forward = sum(op.seconds for op in kinds[0].ops)
    changed = dataclasses.replace(
        profile,
        kinds=kinds,
        blocks=profile.blocks[:layers],
        host=HostCost(
            region_seconds=0.03 * forward,
            region_backward_seconds=0.01 * forward,
            region_op_seconds=0.03 * forward,
            replayed_op_seconds=0.05 * forward,
            swap_out_seconds=0.04 * forward,
            swap_in_seconds=0.04 * forward,
        ),
        engine=EngineSettings(window_bytes=2**28, tail_bytes=2**27, prefetch_bytes=2**28),
    )
    alone = StepSimulator(changed).simulate((LEFT_ALONE,) * layers, changed.engine)
    return dataclasses.replace(changed, measured=Measured(step_seconds=alone.step_seconds, peak_bytes=alone.peak_bytes))


class TrueMachine:
    """The framework's part of planning, and the machine behind it."""

    def __init__(self, seed: int, *, noise: float = 0.004) -> None:
        self.dice = random.Random(seed)
        self.noise = noise
        believed = host_bound(
            stack_profile(self.dice.choice(("8k", "32k"))), layers=8, slow=self.dice.choice((0.3, 0.6, 0.9))
        )
        self.true = self._perturbed(believed)
        self.stall_cost = self._spread(0.25)
        self.more = {moment: int(self.dice.choice((0.0, 0.0, 0.01)) * believed.base.total) for moment in range(2)}
        alone = self.simulated(Solution((LEFT_ALONE,) * len(believed.blocks), believed.engine))
        measured = dataclasses.replace(
            believed.measured, step_seconds=self._noisy(alone.step_seconds), peak_bytes=self.peak_of(alone)
        )
        self.profile = dataclasses.replace(believed, measured=measured)
        self.plan: Plan | None = None
        self.trials = 0

    def _spread(self, sigma: float) -> float:
        return math.exp(max(-2 * sigma, min(2 * sigma, self.dice.gauss(0, sigma))))

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + max(-2.0, min(2.0, self.dice.gauss(0, 1))) * self.noise)

    def _perturbed(self, profile: Profile) -> Profile:
        work, issue, region, swap, link = (self._spread(sigma) for sigma in (0.05, 0.15, 0.5, 0.6, 0.25))

        def kind_of(kind: BlockKind) -> BlockKind:
            ops = tuple(dataclasses.replace(op, seconds=op.seconds * work * self._spread(0.03)) for op in kind.ops)
            return dataclasses.replace(
                kind,
                ops=ops,
                backward_seconds=kind.backward_seconds * work * self._spread(0.02),
                host_forward_seconds=kind.host_forward_seconds * issue,
                host_backward_seconds=kind.host_backward_seconds * issue,
            )

        host = profile.host
        return dataclasses.replace(
            profile,
            kinds=tuple(map(kind_of, profile.kinds)),
            host=HostCost(
                region_seconds=host.region_seconds * region,
                region_backward_seconds=host.region_backward_seconds * region,
                region_op_seconds=host.region_op_seconds * region * self._spread(0.1),
                replayed_op_seconds=host.replayed_op_seconds * region * self._spread(0.1),
                swap_out_seconds=host.swap_out_seconds * swap * self._spread(0.1),
                swap_in_seconds=host.swap_in_seconds * swap * self._spread(0.1),
            ),
            link=dataclasses.replace(
                profile.link,
                out_bytes_per_second=profile.link.out_bytes_per_second / link,
                in_bytes_per_second=profile.link.in_bytes_per_second / link,
            ),
        )

    # ------------------------------------------------------------------ what is true

    def simulated(self, solution: Solution) -> SimulatedStep:
        step = StepSimulator(self.true).simulate(*solution)
        seconds = step.step_seconds + (self.stall_cost - 1) * step.exposed_seconds
        return dataclasses.replace(step, step_seconds=seconds)

    def peak_of(self, step: SimulatedStep) -> int:
        """Bytes that no profile shows: some in backward, some in forward."""
        return step.peak_bytes + self.more["forward" not in step.peak_where]

    def budget(self) -> int:
        """A third of what there is between everything recomputed and nothing."""
        solver = Solver(StepSimulator(self.true))
        least = solver.simulate(Solution(next(iter(solver.by_hand.values())), self.profile.engine)).step.peak_bytes
        most = solver.untouched().step.peak_bytes
        share = self.dice.choice((0.02, 0.15, 0.35))
        return int(1.01 * least + share * (most - least))

    def best_known(self, budget: int, *, effort: float = 1.0) -> float:
        """The shortest step that a search on the true machine finds, waits for copies as they are there."""
        solver = Solver(StepSimulator(self.true))
        solver.solve(budget, effort=effort)
        fitting = [
            self.simulated(answer.solution)
            for answer in solver._simulated.values()
            if self.peak_of(answer.step) <= budget
        ]
        return min((step.step_seconds for step in fitting), default=math.inf)

    # ------------------------------------------------------------------ the framework's part

    def world(self) -> None:
        return None

    @contextlib.contextmanager
    def guarded(self, model: Any, *, who: str) -> Iterator[None]:
        yield

    def profile_memory(self, model: Any, step: Any, **_: Any) -> Profile:
        return self.profile

    def apply_plan(self, model: Any, plan: Plan) -> _Applied:
        return _Applied(self, plan)

    def measure_step(self, model: Any, step: Any, *, steps: int, **_: Any) -> StepMeasure:
        assert self.plan is not None
        self.trials += 1
        solution = solution_of(self.profile, self.plan)
        if solution is None:  # swapping whole blocks
            return _measure(self.true.base.total, math.inf, is_complete=False)
        real = self.simulated(solution)
        return _measure(self.peak_of(real), self._noisy(real.step_seconds))


class _Applied:
    def __init__(self, machine: TrueMachine, plan: Plan) -> None:
        self.machine, self.plan = machine, plan

    def __enter__(self) -> _Applied:
        self.machine.plan = self.plan
        return self

    def __exit__(self, *exc: object) -> None:
        self.machine.plan = None


def _measure(peak_bytes: int, seconds: float, *, is_complete: bool = True) -> StepMeasure:
    return StepMeasure(
        peak_bytes=peak_bytes,
        step_seconds=seconds,
        reserved_bytes=peak_bytes,
        swapped_out_bytes=0,
        exposed_copy_seconds=0.0,
        late_loads=0,
        misses=0,
        is_complete=is_complete,
    )
