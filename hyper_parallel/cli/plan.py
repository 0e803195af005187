"""Plan a memory budget: which values to save, to swap and to recompute.

Plans for the model that MODULE:FACTORY names, or from a profile that was written before. Nothing is applied; in training
apply it with `hp.apply_plan(model, hp.Plan.load("plan.json"))`.

With --mesh nothing is planned for this device. From the same profile, whose step is one micro-batch, peak and step time on many
devices are predicted, rank by rank, and every assumption is printed.

Example::

  hyper-parallel plan train:make_model --budget 20GiB -o plan.json
  hyper-parallel plan --profile profile.json --mesh pp=8,fsdp=16,tp=8 --microbatches 32 --layers 80
"""

from __future__ import annotations

import argparse

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.explain import show_answer
from hyper_parallel.cli.factory import add_model_arguments, require_writable
from hyper_parallel.cli.failures import UsageError
from hyper_parallel.cli.mesh import add_mesh_arguments, mesh_question, show_mesh
from hyper_parallel.cli.profile import measured_profile
from hyper_parallel.planner.budget import check_budget
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import Profile
from hyper_parallel.records.record_files import as_json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add_model_arguments(parser, is_optional=True)
    parser.add_argument("--profile", metavar="FILE", help="plan from this profile instead of measuring")
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="the peak to keep, such as 20GiB, 90%% or auto; with --mesh that of each device",
    )
    parser.add_argument("--effort", type=_effort, default=1.0, metavar="X", help="how long to search (default 1.0)")
    parser.add_argument("-o", "--output", metavar="FILE", default="plan.json", help="default plan.json")
    add_mesh_arguments(parser)


def _effort(text: str) -> float:
    """A number above 0 and up to 100."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 100")
    return value


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    if (args.factory is None) == (args.profile is None):
        raise UsageError("give either MODULE:FACTORY or --profile FILE, and not both")
    if args.budget is None and args.mesh is None:
        raise UsageError("give --budget BYTES, or --mesh SIZES for a prediction")
    try:
        if args.budget is not None:
            check_budget(args.budget, name="--budget")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.mesh is not None:
        question = mesh_question(args)
        profile = Profile.load(args.profile) if args.profile else measured_profile(args, console)
        show_mesh(profile, question, console)
        return 0
    require_writable(args.output)
    profile = Profile.load(args.profile) if args.profile else measured_profile(args, console)
    with console.waiting("searching for a plan"):
        plan = plan_memory(profile, args.budget, effort=args.effort)
    plan.save(args.output)
    console.data({"plan": args.output, "predicted": as_json(plan.predicted), "untouched": as_json(plan.untouched)})
    show_answer(plan, console)
    console.say(f"written to {args.output}; why: hyper-parallel explain {args.output}")
    console.say(f"in training: hp.apply_plan(model, hp.Plan.load({args.output!r}))")
    return 0
