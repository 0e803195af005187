"""Compare ways of running your own model's step: peak, time, bytes moved, and the gradients, bit for bit.

Ways: none, recompute, inputs, swap, boundary, attention, elementwise, rules, and auto for a --budget. Writes a run record
that `report` draws. The model is as it was afterwards.

Example::

  hyper-parallel bench train:make_model --ways none,recompute,swap,auto --budget 20GiB -o run.json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import platform
from typing import Any, Final

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import add_model_arguments, built_model, require_writable, simulated_where_asked
from hyper_parallel.cli.failures import CommandError, UsageError, did_you_mean
from hyper_parallel.cli.report import show_run
from hyper_parallel.config import current_config
from hyper_parallel.planner.backend import planner_backend
from hyper_parallel.planner.budget import check_budget, parse_budget, show_setting
from hyper_parallel.planner.fit import fit_memory, profile_memory
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.record_files import as_json
from hyper_parallel.records.run_record import RunRecord, StepRecord
from hyper_parallel.report.page import write_page

__all__ = ["add_arguments", "run"]

_DEFAULT_WAYS: Final = "none,recompute,swap"
_UNREPEATABLE: Final = (
    "gradients were not compared: the first way does not repeat its own (another batch, or ops that add in any order); "
    "have the step use one batch, and torch.use_deterministic_algorithms(True)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add_model_arguments(parser)
    parser.add_argument(
        "--ways", default=None, metavar="A,B,...", help=f"default {_DEFAULT_WAYS}, and auto with --budget"
    )
    parser.add_argument("--budget", metavar="BYTES", help="for auto: the peak to keep, such as 20GiB or 90%%")
    parser.add_argument("-o", "--output", metavar="FILE", default="run.json", help="default run.json")
    parser.add_argument("--html", metavar="FILE", help="also the report")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    planner_backend("bench", torch_only="the observer of a step is written for torch alone")  # before anything is built
    from hyper_parallel.backends.torch.step_observation import WAYS

    ways = (args.ways or _DEFAULT_WAYS + (",auto" if args.budget else "")).split(",")
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        near = did_you_mean(unknown[0], WAYS)
        raise UsageError(f"--ways: there is no way {unknown[0]!r}{near or ';'} known are {', '.join(WAYS)}")
    if len(set(ways)) != len(ways):
        raise UsageError(f"--ways: {args.ways!r} must name each way at most once")
    if "auto" in ways and args.budget is None:
        raise UsageError("--ways: auto needs a --budget, such as --budget 20GiB")
    if args.budget is not None:
        try:
            check_budget(args.budget, name="--budget")
        except ValueError as error:
            raise UsageError(str(error)) from None
    require_writable(args.output, args.html)
    record = _measured(args, ways, console)
    record.save(args.output)
    if args.html is not None:
        write_page(args.html, record)
    names = ("name", "peak_bytes", "step_seconds", "seconds", "out_bytes", "back_bytes", "exposed_seconds", "regions")
    console.data(
        {"record": args.output, "ways": [{n: as_json(getattr(step, n)) for n in names} for step in record.steps]}
    )
    show_run(record, console)
    for note in record.notes:
        console.say(note)
    console.say(f"written to {args.output}; draw it with: hyper-parallel report {args.output} -o report.html")
    wrong = [step.name for step in record.steps if record.are_gradients_equal(step) is False]
    if wrong:
        raise CommandError(
            f"the first step's gradients of {', '.join(wrong)} differ from those of {ways[0]}, which repeats its own bit for "
            f"bit; please report this with {args.output}"
        )
    return 0


def _measured(args: argparse.Namespace, ways: list[str], console: Console) -> RunRecord:
    from hyper_parallel.backends.torch import step_observation

    with console.progress("bench", len(ways) + 2) as advance:
        advance(f"building {args.factory}")
        model, step = built_model(args.factory)
        with simulated_where_asked(args.simulate):
            blocks = step_observation.find_observed_blocks(model, args.blocks)
            observer = step_observation.StepObserver(model, step, blocks)
            if observer.memory_kind.startswith("resident"):
                raise CommandError(
                    "the model is on the CPU, and one process cannot tell the memory of one way from that of the next; "
                    "move it to an accelerator, or count bytes with --simulate"
                )
            if args.budget is not None:
                memory = functools.partial(planner_backend().device_memory, model, who="bench")
                budget = parse_budget(args.budget, name="--budget", memory=memory)
                args = argparse.Namespace(**{**vars(args), "budget": budget})
            steps: list[StepRecord] = []
            plans: dict[str, Any] = {}  # by way
            for way in ways:
                advance(f"running {way}")
                steps.append(_one(args, way, model, step, blocks, observer, plans, is_first=not steps))
            advance(f"timing {args.steps} rounds")
            seconds = _timed_in_turns(args, ways, model, blocks, observer, plans)
            steps = [one.timed(seconds[one.name]) for one in steps]
            versions = step_observation.versions_of(model)
    return RunRecord(
        title=f"{args.factory}, {len(ways)} ways",
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        versions=versions,
        memory_kind=observer.memory_kind,
        budget_bytes=args.budget,
        settings={
            field.name: show_setting(field.name, getattr(current_config(), field.name))
            for field in dataclasses.fields(current_config())
        },
        machine={"system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count())},
        steps=tuple(steps),
        notes=() if steps[0].gradients else (_UNREPEATABLE,),
    )


def _timed_in_turns(
    args: argparse.Namespace, ways: list[str], model: Any, blocks: Any, observer: Any, plans: dict[str, Any]
) -> dict[str, list[float]]:
    """Seconds of every way, in rounds: each way runs once in every round, so that a slow minute slows them all."""
    from hyper_parallel.backends.torch import step_observation

    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.steps):
        for way in ways:
            with step_observation.in_one_way(model, blocks, way, plans.get(way)):
                with planner_backend().guarded(model, who="bench"):
                    seconds[way].append(observer.time_one())
    return seconds


def _one(
    args: argparse.Namespace,
    way: str,
    model: Any,
    step: Any,
    blocks: Any,
    observer: Any,
    plans: dict[str, Any],
    *,
    is_first: bool,
) -> StepRecord:
    """One way, from the model as it was given; blocks and observer are the framework's.

    The first way runs its step once more. Where it does not give its own gradients again, comparing would say nothing.
    """
    from hyper_parallel.backends.torch import step_observation

    profile = plan = None
    if way == "auto":
        profile = profile_memory(model, step, blocks=args.blocks, steps=args.steps)
        fitted = fit_memory(model, step, args.budget, blocks=args.blocks, profile=profile, steps=args.steps)
        plan = plans[way] = fitted.plan
        fitted.remove()
    seen, again = step_observation.FirstGradients(model), step_observation.FirstGradients(model)
    with step_observation.in_one_way(model, blocks, way, plan):
        with planner_backend().guarded(model, who="bench"):
            record: StepRecord = observer.observe(way, what=step_observation.WAYS[way].what, steps=1, after=seen)
        if is_first:
            with planner_backend().guarded(model, who="bench"):
                again(step())
    if not is_first or again.fingerprint == seen.fingerprint:
        record = dataclasses.replace(record, gradients=seen.fingerprint)
    if profile is None or plan is None:
        return record
    return dataclasses.replace(record, ops=op_totals(profile, plan), predicted=plan.predicted)
