"""Simulates the step of one rank of a pipeline: the passes of its stages, in the order of its schedule.

The blocks of all the rank's stages are one list, and every block has one fate for all micro-batches. Bytes are counted as in
``step_simulator``, with as many passes alive as the order says. Time is the rank's own device: what it waits for other ranks is
left out, so copies hide behind its own work only.

Rules beside those of ``step_simulator``
----------------------------------------
1. At the beginning of a backward, and of a forward right before one of another pass, loads are started in the order of the
   backwards to come, until ``prefetch_bytes`` are ahead. They go on across the end of a backward.
2. A backward in two halves takes half of the backward's seconds each; what its first half frees stays until the second.
3. The whole step is one moment of the corrections: that of the blocks' backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hyper_parallel.planner.block_trace import HEAD, SAVED, BlockTrace, Choice
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.pipeline_order import Action, ActionKind, Order, Pass, loads_begin, turns_of
from hyper_parallel.planner.profile import EngineSettings, Profile, Segment
from hyper_parallel.planner.simulated_copies import CANCELLED, COMING, FAR, LEAVING, SimulatedRecord
from hyper_parallel.planner.step_simulator import ExplainedSimulation, SimulatedStep, Simulation, StepSimulator

__all__ = ["PipelineSimulator", "PipelineStep", "StagePart"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePart:
    """One stage's part of a rank's profile."""

    stage: int
    first_block: int
    stop_block: int
    prologue: Segment
    epilogue: Segment
    left_bytes: int = 0  # what a pass leaves behind until the step ends: the graph of its loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """A simulated step of one rank, and how long each of its actions takes on the device."""

    step: SimulatedStep
    action_seconds: dict[Action, float]


class PipelineSimulator(StepSimulator):
    """Simulates a rank's order over its stages. ``Solver`` searches with it as with any other simulator."""

    def __init__(
        self, profile: Profile, parts: Sequence[StagePart], order: Order, corrections: Corrections | None = None
    ) -> None:
        super().__init__(profile, corrections)
        self.parts = {part.stage: part for part in parts}
        self.order = order
        self.turns = turns_of(order)

    def simulate(self, choices: Sequence[Choice], settings: EngineSettings) -> SimulatedStep:
        """See the base class."""
        return self.run_order(choices, settings).step

    def explain(self, choices: Sequence[Choice], settings: EngineSettings) -> SimulatedStep:
        """See the base class."""
        traces = [self.trace(block, choice) for block, choice in enumerate(choices)]
        return _ExplainedRank(self, traces, settings).run()

    def run_order(self, choices: Sequence[Choice], settings: EngineSettings) -> PipelineStep:
        """One step, with the seconds of each action."""
        self.simulations += 1
        traces = [self.trace(block, choice) for block, choice in enumerate(choices)]
        for action in self.order:
            part = self.parts[action.stage]
            is_forward = action.kind is ActionKind.FORWARD
            self.cost += sum(
                len(trace.forward if is_forward else trace.backward)
                for trace in traces[part.first_block : part.stop_block]
            )
        simulation = _RankSimulation(self, traces, settings)
        step = simulation.run()
        return PipelineStep(step=step, action_seconds=simulation.action_seconds)


class _RankSimulation(Simulation):
    """One step of one rank."""

    def __init__(self, simulator: PipelineSimulator, traces: list[BlockTrace], settings: EngineSettings) -> None:
        super().__init__(simulator, traces, settings)
        self._rank = simulator
        self._of_pass: dict[Pass, list[list[SimulatedRecord]]] = {}
        self._held: dict[Pass, int] = {}  # what a first half freed, by pass, until the second half is over
        self._left = 0
        self._compute = self._replay = 0.0
        self.action_seconds: dict[Action, float] = {}

    def run(self) -> SimulatedStep:
        """All actions, in order."""
        unexplained = self.corrections.moments.blocks_backward
        self.moments = [0, 0, 0]
        self._begin_moment(unexplained)
        order = self._rank.order
        for position, action in enumerate(order):
            began = self.now
            if loads_begin(order, position):
                self._forecast_from(position)
            self._act(action)
            self.action_seconds[action] = self.now - began
        self._add_bytes(HEAD, -self._left)
        self._end_moment(unexplained)
        self.moments.append(0)
        return self._result()

    def _act(self, action: Action) -> None:
        part = self._rank.parts[action.stage]
        if action.kind is ActionKind.FORWARD:
            self._forward_pass(action, part)
        elif action.kind is ActionKind.WEIGHT:
            self._add_bytes(SAVED, -self._held.pop(action.key))
            self.now += 0.5 * self._backward_seconds(part) * self.scale
        else:
            self._backward_pass(action, part)

    def _forward_pass(self, action: Action, part: StagePart) -> None:
        blocks = range(part.first_block, part.stop_block)
        self.records = self._of_pass[action.key] = [[] for _ in self.traces]
        self._segment_forward(part.prologue, -1)
        for block in blocks:
            self._forward(block, self.traces[block])
        self._segment_forward(part.epilogue, len(self.traces))
        self._compute += sum(self.traces[block].compute_seconds for block in blocks)
        self._compute += sum(
            segment.forward_seconds + segment.backward_seconds for segment in (part.prologue, part.epilogue)
        )
        self._replay += sum(self.traces[block].replay_seconds for block in blocks)

    def _backward_pass(self, action: Action, part: StagePart) -> None:
        self.records = self._of_pass[action.key]
        before = self.live
        self._segment_backward(part.epilogue, len(self.traces))
        for block in reversed(range(part.first_block, part.stop_block)):
            self._backward(block, self.traces[block])
        self._segment_backward(part.prologue, -1)
        del self._of_pass[action.key]
        self._left += part.left_bytes
        self._add_bytes(HEAD, part.left_bytes)
        if action.kind is ActionKind.INPUT:  # rule 2
            self._held[action.key] = held = max(0, before - self.live)
            self._add_bytes(SAVED, held)
            self.now -= 0.5 * self._backward_seconds(part) * self.scale

    def _backward_seconds(self, part: StagePart) -> float:
        """Of one pass, without what is replayed."""
        blocks = sum(
            event.seconds
            for trace in self.traces[part.first_block : part.stop_block]
            for event in trace.backward
            if event.phase == "backward"
        )
        return blocks + part.prologue.backward_seconds + part.epilogue.backward_seconds

    # ------------------------------------------------------------------ loads, in the order of the backwards to come

    def _forecast_from(self, position: int) -> None:
        """Rule 1."""
        later: list[tuple[int, Pass]] = []
        for key in self._of_pass:
            turn = next((turn for turn in self._rank.turns[key] if turn >= position), None)
            if turn is not None:
                later.append((turn, key))
        self.forecast = [
            self._of_pass[key][block][record]
            for _, key in sorted(later)
            for block in reversed(range(len(self.traces)))
            for record in self.traces[block].wanted
            if record < len(self._of_pass[key][block])
            and self._of_pass[key][block][record].state in (LEAVING, FAR, COMING, CANCELLED)
        ]
        for record in self.forecast:  # what came early counts where it stands in the order
            self._not_ahead(record)
        self.next_load = 0
        if self.forecast:
            self._prefetch()
            self._check_peak("backward", 0)

    def _make_forecast(self) -> None:
        """It was made when the action began."""
        self.forecast = []

    def _busy_seconds(self) -> tuple[float, float]:
        return self._compute * self.scale, self._replay * self.scale


class _ExplainedRank(_RankSimulation, ExplainedSimulation):
    """The same, which also counts the parts of the peak."""
