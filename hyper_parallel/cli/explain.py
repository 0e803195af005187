"""Say what a plan does, why, and what it costs.

With --profile also by kind of op; with --diff how another plan differs.

Example::

  hyper-parallel explain plan.json
"""

from __future__ import annotations

import argparse

from hyper_parallel.cli.console import Console
from hyper_parallel.config import show_bytes
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.record_files import as_json

__all__ = ["add_arguments", "run", "show_plan"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("plan", metavar="PLAN", help="a plan.json")
    parser.add_argument("--profile", metavar="FILE", help="the profile it was made from, for bytes by kind of op")
    parser.add_argument("--diff", metavar="PLAN", help="another plan to compare with")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    plan = Plan.load(args.plan)
    profile = None if args.profile is None else Profile.load(args.profile)
    other = None if args.diff is None else Plan.load(args.diff)
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
            "changes": list(changes),
        }
    )
    show_plan(plan, console, profile=profile)
    if other is not None:
        console.say(f"how {args.diff} differs:" if changes else f"{args.diff} does the same")
        for change in changes:
            console.say(f"  {change}")
    return 0


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
