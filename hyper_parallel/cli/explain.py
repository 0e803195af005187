"""Say what a plan does, why, and what it costs.

With --profile also by kind of op; with --diff how another plan differs; with --run which regions ran from a tape, which
ran Python again, and why.

Example::

  hyper-parallel explain plan.json --run run.json
"""

from __future__ import annotations

import argparse

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.report import region_lines
from hyper_parallel.config import show_bytes
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.record_files import as_json
from hyper_parallel.records.run_record import RunRecord, StepRecord

__all__ = ["add_arguments", "run", "show_plan"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json")
    parser.add_argument("--profile", metavar="FILE", help="the profile it was made from, for bytes by kind of op")
    parser.add_argument(
        "--run", metavar="RUN", dest="run_record", help="a run.json of `bench`, for how the recomputed regions ran"
    )
    parser.add_argument("--diff", metavar="PLAN", help="another plan to compare with")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    plan = Plan.load(args.plan)
    profile = None if args.profile is None else Profile.load(args.profile)
    other = None if args.diff is None else Plan.load(args.diff)
    step = None if args.run_record is None else _planned_step(RunRecord.load(args.run_record))
    changes = () if other is None else plan.diff(other)
    totals = () if profile is None else op_totals(profile, plan)
    console.data(
        {
            "budget_bytes": plan.budget_bytes,
            "predicted": as_json(plan.predicted),
            "untouched": as_json(plan.untouched),
            "what_if": as_json(plan.what_if),
            "summary": plan.summary().splitlines(),
            "ops": as_json(totals),
            "recomputed_regions": _recomputed_regions(plan),
            "regions": [] if step is None else as_json(step.regions),
            "changes": list(changes),
        }
    )
    show_plan(plan, console, profile=profile)
    _show_regions(plan, step, console)
    if other is not None:
        console.say(f"how {args.diff} differs:" if changes else f"{args.diff} does the same")
        for change in changes:
            console.say(f"  {change}")
    return 0


def _recomputed_regions(plan: Plan) -> int:
    recipes = [recipe for recipe in map(plan.recipe_of, plan.blocks) if recipe is not None]
    return sum(region.is_replayed for recipe in recipes for region in recipe.regions)


def _planned_step(record: RunRecord) -> StepRecord:
    """The step of a run that ran under a plan; the last one where none did."""
    return next((step for step in record.steps if step.predicted is not None), record.steps[-1])


def _show_regions(plan: Plan, step: StepRecord | None, console: Console) -> None:
    count = _recomputed_regions(plan)
    if not count:
        return
    if step is None:
        regions = "1 region is" if count == 1 else f"{count} regions are"
        console.say(
            f"{regions} recomputed: from a tape where torch's native recorder is there, which `hyper-parallel doctor` says; "
            "--run RUN says how they ran"
        )
        return
    lines = region_lines(step) or [
        "no region was recomputed, or the run was recorded by a version that did not note it"
    ]
    for line in lines:
        console.say(f"in the run, {step.name}: {line}")


def show_plan(plan: Plan, console: Console, *, profile: Profile | None = None) -> None:
    """The plan for a person: its cost, its parts, every decision with a reason."""
    heads = ("", "peak", "step", "replayed", "waiting", "moved out")
    rows = [_row("left alone", plan.untouched), _row("planned", plan.predicted)]
    console.table(f"Budget {show_bytes(plan.budget_bytes)}", heads, rows)
    console.say(plan.summary())
    if plan.recipes:
        _show_decisions(plan, console)
    if profile is not None:
        _show_totals(profile, plan, console)


def _row(name: str, said: Prediction) -> list[str]:
    return [
        name,
        show_bytes(said.peak_bytes),
        f"{said.step_seconds * 1e3:.1f} ms",
        f"{said.replay_seconds * 1e3:.1f} ms",
        f"{said.exposed_seconds * 1e3:.1f} ms",
        show_bytes(said.swapped_out_bytes),
    ]


def _show_decisions(plan: Plan, console: Console) -> None:
    rows = []
    for number, recipe in enumerate(plan.recipes):
        members = [block.name for block in plan.blocks if block.recipe == number]
        for region in recipe.regions:
            rows.append(
                [
                    f"{members[0]} +{len(members) - 1}" if len(members) > 1 else members[0],
                    region.module or "whole block",
                    "input" if region.is_replayed else "all that it saves",
                    region.input_fate.value,
                    "" if region.is_replayed else "the block is not replayed",
                ]
            )
            for op in region.ops:
                rows.append(
                    [
                        "",
                        region.module or "whole block",
                        f"{op.module}::{op.name}#{op.occurrence}",
                        op.fate.value,
                        op.reason,
                    ]
                )
    console.table("Decisions", ("blocks", "region", "value", "fate", "because"), rows, words=(0, 1, 2, 3, 4))


def _show_totals(profile: Profile, plan: Plan, console: Console) -> None:
    rows = [
        [f"{total.op} × {total.count}"]
        + [
            show_bytes(n) if n else "-"
            for n in (total.saved_bytes, total.swapped_bytes, total.recomputed_bytes, total.kept_bytes)
        ]
        for total in op_totals(profile, plan)
    ]
    console.table("Bytes by kind of op", ("op", "saved", "swapped", "recomputed", "left alone"), rows)
