"""The part of ``plan`` that predicts a step on many devices: its options, and its answer as a table."""

from __future__ import annotations

import argparse
import dataclasses

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import positive
from hyper_parallel.cli.failures import UsageError
from hyper_parallel.config import parse_bytes, show_bytes
from hyper_parallel.planner.budget import parse_budget
from hyper_parallel.planner.mesh_prediction import MESH_SCHEDULES, Mesh, MeshPrediction, Network, predict_mesh
from hyper_parallel.planner.profile import Profile
from hyper_parallel.records.record_files import as_json
from hyper_parallel.report.words import show_seconds

__all__ = ["MeshQuestion", "add_mesh_arguments", "mesh_question", "show_mesh"]

_SPEEDS = {
    "hop_speed": ("hop_bytes_per_second", "between stages of the pipeline"),
    "fsdp_speed": ("fsdp_bytes_per_second", "of the collectives that share weights"),
    "tp_speed": ("tp_bytes_per_second", "of the collectives inside a block"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshQuestion:
    """What the command line asks."""

    mesh: Mesh
    micro_batches: int
    schedule: str
    network: Network
    budget: str | None
    layers: int | None


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that go with ``--mesh``."""
    unset = Network()
    group = parser.add_argument_group("prediction for many devices")
    group.add_argument(
        "--mesh", metavar="SIZES", help="predict for a mesh such as pp=8,fsdp=16,tp=8; nothing is planned here"
    )
    group.add_argument("--microbatches", type=positive, default=8, metavar="N", help="of one step (default 8)")
    group.add_argument("--schedule", choices=MESH_SCHEDULES, default="1f1b", help="of the pipeline (default 1f1b)")
    group.add_argument("--stages-per-rank", type=positive, metavar="N", help="with interleaved (default 2)")
    group.add_argument(
        "--layers", type=positive, metavar="N", help="blocks of the whole model (default: those profiled)"
    )
    for option, (name, what) in _SPEEDS.items():
        group.add_argument(
            f"--{option.replace('_', '-')}",
            metavar="BYTES",
            help=f"bytes per second {what}, each direction (default {getattr(unset, name) / 1e9:g}GB)",
        )


def mesh_question(args: argparse.Namespace) -> MeshQuestion:
    """Read and checked, before anything is measured."""
    stages = args.stages_per_rank or (2 if args.schedule == "interleaved" else 1)
    if stages > 1 and args.schedule != "interleaved":
        raise UsageError(f"--stages-per-rank {stages} needs --schedule interleaved")
    try:
        mesh = Mesh.read(args.mesh, stages_per_rank=stages)
        speeds = {
            name: float(parse_bytes(getattr(args, option), name=f"--{option.replace('_', '-')}"))
            for option, (name, _) in _SPEEDS.items()
            if getattr(args, option) is not None
        }
        network = Network(**speeds)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return MeshQuestion(
        mesh=mesh,
        micro_batches=args.microbatches,
        schedule=args.schedule,
        network=network,
        budget=args.budget,
        layers=args.layers,
    )


def show_mesh(profile: Profile, question: MeshQuestion, console: Console) -> None:
    """Predict, and print every rank and every assumption."""
    budget = None
    if question.budget is not None:
        budget = parse_budget(question.budget, name="--budget", memory=lambda: profile.device_memory)
    with console.waiting("predicting"):
        answer = predict_mesh(
            profile,
            question.mesh,
            question.micro_batches,
            schedule=question.schedule,
            network=question.network,
            budget=budget,
            layers=question.layers,
        )
    ranks = [as_json(dataclasses.replace(row, plan=None)) for row in answer.ranks]
    console.data({**as_json(dataclasses.replace(answer, ranks=())), "devices": answer.mesh.devices, "ranks": ranks})
    _show(answer, console)


def _show(answer: MeshPrediction, console: Console) -> None:
    mesh = answer.mesh
    rows = [
        [
            str(row.rank),
            ", ".join(map(str, row.stages)),
            str(row.blocks),
            str(row.in_flight),
            show_bytes(row.base_bytes),
            show_bytes(row.peak_bytes),
            show_seconds(row.busy_seconds),
        ]
        for row in answer.ranks
    ]
    heads = ("rank", "stages", "blocks", "in flight", "base", "peak", "own work")
    console.table(f"Predicted for {mesh.devices} devices: each rank of the pipeline", heads, rows, words=(1,))
    console.say(
        f"step {show_seconds(answer.step_seconds)}, of which {answer.bubble_share:.0%} of the devices' time is waiting; "
        f"{answer.schedule}, {answer.micro_batches} micro-batches, pp {mesh.pp}, fsdp {mesh.fsdp}, tp {mesh.tp}"
    )
    console.say("a prediction, not a measurement; it assumes:")
    for line in answer.assumptions:
        console.say(f"  - {line}")
