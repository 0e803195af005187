"""What a training step would take on many devices, from the profile of one step on one device. A prediction.

The profiled step is one micro-batch. Its blocks are dealt out to the stages in order; what runs before them is the first stage's,
what runs after them the last stage's. From there on the order of the schedule is simulated rank by rank, as for a budget, and the
ranks are put together by what they wait for. Everything that is assumed beyond the profile is a line of :attr:`assumptions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from hyper_parallel.config import show_bytes
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.pipeline_order import (
    Action,
    Order,
    gpipe_order,
    interleaved_order,
    makespan,
    most_in_flight,
)
from hyper_parallel.planner.pipeline_plan import RankPlan, RankPlanning
from hyper_parallel.planner.planning import calibrated
from hyper_parallel.planner.profile import BaseBytes, BlockKind, OpProfile, Profile, Segment
from hyper_parallel.records.record_files import require

__all__ = ["MESH_SCHEDULES", "Mesh", "MeshPrediction", "Network", "RankPrediction", "predict_mesh"]

MESH_SCHEDULES: Final = ("gpipe", "1f1b", "interleaved")
_TENSOR_COLLECTIVES: Final = 4  # of a block's input in forward, and again in backward: two gathers, two scatters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many devices share what."""

    pp: int = 1  # ranks of the pipeline
    fsdp: int = 1  # share weights, gradients and optimizer states
    tp: int = 1  # share the work of a block and its activations (tensor with sequence parallelism)
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(isinstance(value, int) and value >= 1, f"Mesh.{field.name}: {value!r} is no number of 1 or more")

    @property
    def devices(self) -> int:
        """In all."""
        return self.pp * self.fsdp * self.tp

    @classmethod
    def read(cls, text: str, *, stages_per_rank: int = 1) -> Mesh:
        """From ``"pp=8,fsdp=16,tp=8"``.

        Raises:
            ValueError: something else, with what is known.
        """
        found: dict[str, int] = {}
        for part in text.split(","):
            name, equals, number = part.strip().partition("=")
            if (
                name not in ("pp", "fsdp", "tp")
                or not equals
                or not number.isdigit()
                or int(number) < 1
                or name in found
            ):
                raise ValueError(f"mesh: cannot read {part.strip()!r} in {text!r}; write it like pp=8,fsdp=16,tp=8")
            found[name] = int(number)
        return cls(**found, stages_per_rank=stages_per_rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """Speeds between devices, each direction, for one device. The defaults are data-sheet figures, taken at 80 %."""

    hop_bytes_per_second: float = 40e9  # between stages of the pipeline: one 400 Gb/s card for each device
    fsdp_bytes_per_second: float = 40e9
    tp_bytes_per_second: float = 360e9  # NVLink of one machine
    hop_seconds: float = 10e-6  # fixed cost of a message or a collective

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(value > 0 or (field.name == "hop_seconds" and value == 0), f"Network.{field.name}: {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPrediction:
    """One rank of the pipeline; its fsdp and tp peers are alike."""

    rank: int
    stages: tuple[int, ...]
    blocks: int
    in_flight: int  # micro-batches, all of the rank's stages together
    peak_bytes: int
    base_bytes: int  # weights, gradients, states and buffers among them
    busy_seconds: float
    plan: RankPlan | None = None  # with a budget


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshPrediction:
    """The whole mesh."""

    mesh: Mesh
    schedule: str
    micro_batches: int
    ranks: tuple[RankPrediction, ...]
    step_seconds: float
    bubble_share: float  # of the devices' time
    assumptions: tuple[str, ...]


def predict_mesh(
    profile: Profile,
    mesh: Mesh,
    micro_batches: int,
    *,
    schedule: str = "1f1b",
    network: Network | None = None,
    budget: int | None = None,
    layers: int | None = None,
) -> MeshPrediction:
    """Peak and time of every rank of a mesh.

    Args:
        profile: of one step with one micro-batch on one device; see ``profile_memory``.
        mesh: how many devices share what.
        micro_batches: of one step.
        schedule: one of ``MESH_SCHEDULES``.
        network: speeds between devices; None: those of ``Network``.
        budget: bytes of each device: every rank gets a plan that keeps it. None: nothing is recomputed or swapped.
        layers: how many blocks the whole model has; the profiled ones are repeated. None: as many as were profiled.

    Raises:
        PlanError: more stages than blocks, a schedule that is not known.
        BudgetTooSmallError: some rank has no plan.
    """
    if schedule not in MESH_SCHEDULES:
        raise PlanError(f"predict_mesh: unknown schedule {schedule!r}; known are {', '.join(MESH_SCHEDULES)}")
    if schedule != "interleaved" and mesh.stages_per_rank > 1:
        raise PlanError(f"predict_mesh: {schedule} has one stage on each rank; {mesh.stages_per_rank} were asked for")
    if micro_batches < 1:
        raise PlanError(f"predict_mesh: {micro_batches} micro-batches; a step has 1 or more")
    wire = network or Network()
    stages = _Stages(profile, mesh, wire, layers=layers, micro_batches=micro_batches)
    orders = [_order(schedule, rank, mesh, micro_batches) for rank in range(mesh.pp)]
    rows: list[RankPrediction] = []
    seconds: dict[Action, float] = {}
    for rank, order in enumerate(orders):
        row, own = _rank(rank, order, stages, budget)
        rows.append(row)
        seconds |= own
    spans = makespan(orders, seconds, hop_seconds=stages.hop_seconds)
    step = max(end for _, end in spans.values())
    step += stages.sharding_seconds(step)
    return MeshPrediction(
        mesh=mesh,
        schedule=schedule,
        micro_batches=micro_batches,
        ranks=tuple(rows),
        step_seconds=step,
        bubble_share=1 - sum(row.busy_seconds for row in rows) / (step * len(rows)) if step else 0.0,
        assumptions=stages.assumptions(),
    )


def _order(schedule: str, rank: int, mesh: Mesh, micro_batches: int) -> Order:
    if schedule == "gpipe":
        return gpipe_order(rank, micro_batches)
    return interleaved_order(rank, mesh.pp, mesh.stages_per_rank, micro_batches)


def _rank(rank: int, order: Order, stages: _Stages, budget: int | None) -> tuple[RankPrediction, dict[Action, float]]:
    own = sorted({action.stage for action in order})
    profiles = {stage: stages.profile(stage, own) for stage in own}
    planning = RankPlanning(profiles, order, corrections=stages.corrections, left_bytes=stages.left_bytes)
    plan = None if budget is None else planning.plan(budget)
    if plan is None:
        run = planning.untouched()
        peak, seconds = run.step.peak_bytes, run.action_seconds
    else:
        peak, seconds = plan.plan.predicted_peak_bytes, dict(plan.action_seconds)
    seconds = {action: value + stages.tensor_seconds(action) for action, value in seconds.items()}
    row = RankPrediction(
        rank=rank,
        stages=tuple(own),
        blocks=sum(len(stages.blocks_of(stage)) for stage in own),
        in_flight=sum(most_in_flight(order).values()),
        peak_bytes=peak,
        base_bytes=planning.profile.base.total,
        busy_seconds=sum(seconds.values()),
        plan=plan,
    )
    return row, seconds


class _Stages:
    """The profile of each stage, made from that of the whole model."""

    def __init__(
        self, profile: Profile, mesh: Mesh, network: Network, *, layers: int | None, micro_batches: int
    ) -> None:
        self._profile = profile
        self._mesh = mesh
        self._network = network
        self._micro_batches = micro_batches
        self._layers = layers or len(profile.blocks)
        self._numbers = [number % len(profile.blocks) for number in range(self._layers)]
        self._count = mesh.pp * mesh.stages_per_rank
        if self._count > self._layers:
            raise PlanError(
                f"predict_mesh: {self._count} stages need as many blocks, and the model has {self._layers}; use fewer stages, or "
                "say how many layers the model has"
            )
        self._kinds = tuple(_divided_kind(kind, mesh.tp) for kind in profile.kinds)
        in_blocks = sum(profile.kinds[block.kind].weight_bytes for block in profile.blocks)
        self._hidden_bytes = max(block.input_bytes for block in profile.blocks)
        self._knows_weights = in_blocks > 0
        self._even_share = 0 if in_blocks else profile.base.weights // len(profile.blocks)
        self._other_weights = max(0, profile.base.weights - in_blocks) if in_blocks else 0
        self._optimizer_share = profile.base.optimizer / max(1, profile.base.weights)
        self.corrections = Corrections.of_work(calibrated(profile, 0).work_scale)

    def blocks_of(self, stage: int) -> list[int]:
        """The numbers of the profiled blocks that a stage runs: as even as can be, the first stages get the rest."""
        size, rest = divmod(self._layers, self._count)
        first = stage * size + min(stage, rest)
        return self._numbers[first : first + size + (stage < rest)]

    def profile(self, stage: int, own: Sequence[int]) -> Profile:
        """One stage as if it had been measured on a rank with the stages ``own``."""
        whole, tp = self._profile, self._mesh.tp
        blocks = [
            dataclasses.replace(
                whole.blocks[number],
                name=f"{position}.{whole.blocks[number].name}",
                input_bytes=self._input_bytes(number, stage, position) // tp,
            )
            for position, number in enumerate(self.blocks_of(stage))
        ]
        output = Segment(kept_bytes=self.hop_bytes, forward_transient_bytes=self.hop_bytes)
        return dataclasses.replace(
            whole,
            base=self._base(stage, own),
            kinds=self._kinds,
            blocks=tuple(blocks),
            prologue=_divided_segment(whole.prologue, tp) if stage == 0 else Segment(),
            epilogue=_divided_segment(whole.epilogue, tp) if stage == self._count - 1 else output,
            inputs=None,
        )

    def _input_bytes(self, number: int, stage: int, position: int) -> int:
        """A later stage is given a buffer that stays, which ``_buffer_bytes`` counts. A repeated first block follows another."""
        own = self._profile.blocks[number].input_bytes
        if position == 0:
            return own if stage == 0 else 0
        return own or self._hidden_bytes

    # ------------------------------------------------------------------ bytes that are there at every moment

    def _weight_bytes(self, stage: int) -> int:
        """Of one stage on one device, before fsdp shares them."""
        own = sum(self._block_weights(number) for number in self.blocks_of(stage))
        if stage in (0, self._count - 1):
            own += self._other_weights // (1 if self._count == 1 else 2)
        return own // self._mesh.tp

    def _block_weights(self, number: int) -> int:
        return self._profile.kind_of(number).weight_bytes or self._even_share

    def _gathered_bytes(self, own: Sequence[int]) -> int:
        """Weights and gradients that fsdp has put together again."""
        if self._mesh.fsdp == 1:
            return 0
        if self._mesh.pp > 1:
            return 2 * sum(map(self._weight_bytes, own))
        return 3 * max(map(self._block_weights, self._numbers)) // self._mesh.tp

    @property
    def left_bytes(self) -> dict[int, int]:
        """What a micro-batch leaves behind on the last stage until the step ends."""
        return {self._count - 1: self.hop_bytes}

    @property
    def hop_bytes(self) -> int:
        """What goes from one stage to the next."""
        return self._hidden_bytes // self._mesh.tp

    def _buffer_bytes(self, own: Sequence[int]) -> int:
        """What stages receive, and the batch on the first and the last rank; for every micro-batch."""
        received = sum((stage > 0) + (stage < self._count - 1) for stage in own) * self.hop_bytes
        ends = (0 in own) + (self._count - 1 in own)
        return self._micro_batches * (received + ends * (self._profile.base.other // 2 // self._mesh.tp))

    def _base(self, stage: int, own: Sequence[int]) -> BaseBytes:
        """Of the whole rank, as each of its stages would have measured it."""
        fsdp, share = self._mesh.fsdp, self._optimizer_share
        weights = self._weight_bytes(stage) // fsdp
        others = sum(self._weight_bytes(each) // fsdp for each in own if each != stage)
        return BaseBytes(
            weights=weights,
            gradients=weights,
            optimizer=int(weights * share),
            other=int(others * (2 + share)) + self._gathered_bytes(own) + self._buffer_bytes(own),
        )

    # ------------------------------------------------------------------ seconds on the network

    @property
    def hop_seconds(self) -> float:
        """What an activation, or its gradient, takes from one stage to the next."""
        if self._mesh.pp == 1:
            return 0.0
        return self._network.hop_seconds + self.hop_bytes / self._network.hop_bytes_per_second

    def tensor_seconds(self, action: Action) -> float:
        """What tensor parallelism adds to one forward or backward."""
        tp, blocks = self._mesh.tp, self.blocks_of(action.stage)
        if tp == 1:
            return 0.0
        moved = self._hidden_bytes * len(blocks) * (tp - 1) / tp
        fixed = self._network.hop_seconds * len(blocks)
        return _TENSOR_COLLECTIVES * (moved / self._network.tp_bytes_per_second + fixed)

    def sharding_seconds(self, busy_seconds: float) -> float:
        """What fsdp adds to a step that computes for so long."""
        fsdp = self._mesh.fsdp
        if fsdp == 1:
            return 0.0
        most = max(
            sum(map(self._weight_bytes, range(rank, self._count, self._mesh.pp))) for rank in range(self._mesh.pp)
        )
        once = most * (fsdp - 1) / fsdp / self._network.fsdp_bytes_per_second
        if self._mesh.pp > 1:
            return 2 * once
        return max(0.0, 3 * self._micro_batches * once - busy_seconds)

    def assumptions(self) -> tuple[str, ...]:
        """Everything that the profile does not say."""
        mesh, wire, base = self._mesh, self._network, self._profile.base
        found = [
            f"one micro-batch is the profiled step; {self._layers} blocks ({len(self._profile.blocks)} profiled) are dealt out "
            f"to {self._count} stages in order, the first stages get the rest",
            f"{show_bytes(self._other_weights)} of weights are outside of the blocks: half on the first stage, half on the last"
            if self._knows_weights
            else "the profile does not say where the weights are: all of them are in the blocks, in equal parts",
            f"gradients are as large as weights, and optimizer states {self._optimizer_share:.2f} times as large, as profiled",
            f"{show_bytes(base.other)} beside weights and states are the batch: half on the first, half on the last rank, for "
            "each micro-batch",
        ]
        if mesh.pp > 1:
            found.append(
                f"each stage keeps a buffer of {show_bytes(self.hop_bytes)} for each micro-batch that it receives, and for each "
                f"gradient, as torch does; a hop takes {self.hop_seconds * 1e6:.0f} us at {_rate(wire.hop_bytes_per_second)}"
            )
        found.append(
            f"every loss keeps {show_bytes(self.hop_bytes)} of its graph on the last stage until the step ends, as in torch"
        )
        if mesh.tp > 1:
            found.append(
                f"tp divides weights, states, activations, the batch and all work by {mesh.tp} (with sequence "
                f"parallelism, no kernel is slower for being smaller); each block adds {_TENSOR_COLLECTIVES} collectives of its "
                f"input to forward and to backward, not overlapped, at {_rate(wire.tp_bytes_per_second)}"
            )
        if mesh.fsdp > 1 and mesh.pp > 1:
            found.append(
                f"fsdp divides weights, gradients and states by {mesh.fsdp}; a rank's stages are gathered once a step and stay "
                "whole, gradients too, as in torch's schedules; neither collective is overlapped, at "
                f"{_rate(wire.fsdp_bytes_per_second)}"
            )
        elif mesh.fsdp > 1:
            found.append(
                f"fsdp divides weights, gradients and states by {mesh.fsdp}; two blocks' weights and one block's gradients are "
                "whole at a time; three collectives for each micro-batch run beside compute, at "
                f"{_rate(wire.fsdp_bytes_per_second)}"
            )
        found.append("devices are equal, nothing fragments, and the optimizer's own step is left out")
        return tuple(found)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:g} GB/s"


def _divided_op(op: OpProfile, by: int) -> OpProfile:
    return dataclasses.replace(
        op,
        seconds=op.seconds / by,
        output_bytes=op.output_bytes // by,
        kept_bytes=op.kept_bytes // by,
        workspace_bytes=op.workspace_bytes // by,
        backward_seconds=op.backward_seconds / by,
        backward_bytes=op.backward_bytes // by,
    )


def _divided_kind(kind: BlockKind, by: int) -> BlockKind:
    """What the host takes to issue ops is not divided."""
    if by == 1:
        return kind
    return dataclasses.replace(
        kind,
        ops=tuple(_divided_op(op, by) for op in kind.ops),
        backward_seconds=kind.backward_seconds / by,
        backward_transient_bytes=kind.backward_transient_bytes // by,
        gradient_bytes=kind.gradient_bytes // by,
        weight_bytes=kind.weight_bytes // by,
    )


def _divided_segment(segment: Segment, by: int) -> Segment:
    return Segment(
        forward_seconds=segment.forward_seconds / by,
        backward_seconds=segment.backward_seconds / by,
        kept_bytes=segment.kept_bytes // by,
        forward_transient_bytes=segment.forward_transient_bytes // by,
        backward_transient_bytes=segment.backward_transient_bytes // by,
        gradient_bytes=segment.gradient_bytes // by,
    )
