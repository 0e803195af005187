"""Say what a plan does, why, and what it costs.

With --profile also by kind of op; with --diff how another plan differs; with --run which regions ran from a tape, which
ran Python again, and why.

Example::

  hyper-parallel explain plan.json --run run.json
"""

from __future__ import annotations

import argparse
from typing import Final

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.report import region_lines
from hyper_parallel.config import show_bytes
from hyper_parallel.fates import Fate
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.prediction import Prediction
from hyper_parallel.records.record_files import as_json
from hyper_parallel.records.run_record import RunRecord, StepRecord

__all__ = ["add_arguments", "run", "show_answer", "show_plan"]

_FATE_WORDS: Final = {Fate.SAVE: "saved", Fate.SWAP: "swapped", Fate.RECOMPUTE: "made again"}


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


_MEASURE: Final = (
    "Every value is compared by one measure: what making it again costs, in ms for each GiB of its memory. The higher, the "
    "sooner it is saved or swapped; the lower, the sooner it is made again. The planner tries whole combinations, and a value "
    "that others need is made again with them, so single values can be out of this order. Values that no backward reads are "
    "neither kept nor made again, and are left out."
)


def show_answer(plan: Plan, console: Console) -> None:
    """The short answer: what it costs and gains, and what becomes of which blocks."""
    heads = ("", "peak", "step", "replayed", "waiting", "moved out")
    rows = [_row("left alone", plan.untouched), _row("planned", plan.predicted)]
    console.table(f"Budget {show_bytes(plan.budget_bytes)}", heads, rows)
    if plan.does_nothing:
        console.say("the step fits: nothing is done")
    for names, reason in plan.treatments():
        console.say(f"{names}: {reason}")
    for note in plan.notes:
        console.say(note)


def show_plan(plan: Plan, console: Console, *, profile: Profile | None = None) -> None:
    """The plan for a person: its cost, its parts, every decision with a reason."""
    show_answer(plan, console)
    predicted = plan.predicted
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in predicted.peak_parts.items() if size)
    console.say(f"the peak is at the {predicted.peak_where}, made of: {parts}")
    for other in plan.what_if:
        if other.peak_bytes is None or other.step_seconds is None:
            console.say(f"with {show_bytes(other.budget_bytes)}: nothing fits")
        else:
            peak, step = show_bytes(other.peak_bytes), f"{other.step_seconds * 1e3:.1f} ms"
            console.say(f"with {show_bytes(other.budget_bytes)}: peak {peak}, step {step}")
    if plan.recipes:
        console.say()
        console.say(_MEASURE)
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
    """A table for each region of each recipe, the values that cost most first."""
    for number, recipe in enumerate(plan.recipes):
        members = [block.name for block in plan.blocks if block.recipe == number]
        names = f"{members[0]} and {len(members) - 1} more" if len(members) > 1 else members[0]
        for region in recipe.regions:
            console.say()
            where = f"{names}, {region.module or 'whole block'}"
            if not region.is_replayed:
                console.say(f"{where}: not replayed; whatever it saves for backward is swapped")
                continue
            title = f"{where}: input {_FATE_WORDS[region.input_fate]}"
            ops = sorted((op for op in region.ops if op.is_needed), key=lambda op: -op.price_ms_per_gib)
            rows = [
                [
                    f"{op.module}::{op.name}#{op.occurrence}",
                    _FATE_WORDS[op.fate],
                    f"{op.price_ms_per_gib:,.0f}" if op.price_ms_per_gib else "?",
                    show_bytes(op.nbytes) if op.nbytes else "?",
                ]
                for op in ops
            ]
            if rows:
                console.table(title, ("value", "fate", "ms per GiB", "memory"), rows, words=(0, 1))
            else:
                console.say(f"{title}, everything else made again")


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
