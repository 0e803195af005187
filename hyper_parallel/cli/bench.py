"""Compare ways of running your own model's step: peak, time, bytes moved, and the gradients, bit for bit.

Ways: none, recompute, inputs, swap, boundary, attention, elementwise, rules, and auto for a --budget. Writes a run record
that `report` draws. The model is as it was afterwards.

Example::

  hyper-parallel bench train:make_model --ways none,recompute,swap,auto --budget 20GiB -o run.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any, Final

from hyper_parallel.backends.step_observation.framework import observed_framework
from hyper_parallel.backends.step_observation.gradients import FirstGradients
from hyper_parallel.backends.step_observation.step_observer import StepObserver, find_observed_blocks, versions_of
from hyper_parallel.backends.step_observation.ways import WAYS, in_one_way
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import add_model_arguments, built_model, require_writable, simulated_where_asked
from hyper_parallel.cli.failures import CommandError, UsageError, did_you_mean
from hyper_parallel.cli.report import show_run
from hyper_parallel.config import current_config
from hyper_parallel.planner.backend import planner_backend
from hyper_parallel.planner.budget import check_budget, parse_budget, show_setting
from hyper_parallel.planner.fit import fit_memory, profile_memory
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.totals import op_totals
from hyper_parallel.records.record_files import as_json
from hyper_parallel.records.run_record import RunRecord, StepRecord
from hyper_parallel.report.page import write_page

__all__ = ["add_arguments", "run"]

_DEFAULT_WAYS: Final = "none,recompute,swap"


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
    with console.progress("bench", len(ways) + 2) as advance:
        advance(f"building {args.factory}")
        model, step = built_model(args.factory)
        with simulated_where_asked(args.simulate):
            bench = _Bench(args, model, step)
            steps: list[StepRecord] = []
            for way in ways:
                advance(f"running {way}")
                steps.append(bench.observed(way, is_first=not steps))
            advance(f"timing {args.steps} rounds")
            seconds = bench.timed_in_turns(ways)
            steps = [one.timed(seconds[one.name]) for one in steps]
            versions = versions_of(bench.framework, model)
    return RunRecord(
        title=f"{args.factory}, {len(ways)} ways",
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        versions=versions,
        memory_kind=bench.observer.memory_kind,
        budget_bytes=bench.budget_bytes,
        settings={
            field.name: show_setting(field.name, getattr(current_config(), field.name))
            for field in dataclasses.fields(current_config())
        },
        machine={"system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count())},
        steps=tuple(steps),
        notes=() if steps[0].gradients else (bench.why_not_compared,),
    )


class _Bench:
    """One model in several ways. Each way begins with the model as it was given."""

    def __init__(self, args: argparse.Namespace, model: Any, step: Any) -> None:
        self.framework = observed_framework()
        self.why_not_compared = ""
        self._args = args
        self._model = model
        self._step = step
        self._blocks = find_observed_blocks(self.framework, model, args.blocks)
        self._plans: dict[str, Plan] = {}  # by way
        self.observer = StepObserver(self.framework, model, step, self._blocks)
        if self.observer.memory_kind.startswith("resident"):
            raise CommandError(
                "the model is on the CPU, and one process cannot tell the memory of one way from that of the next; "
                "move it to an accelerator, or count bytes with --simulate"
            )
        self.budget_bytes: int | None = None
        if args.budget is not None:
            memory = functools.partial(planner_backend().device_memory, model, who="bench")
            self.budget_bytes = parse_budget(args.budget, name="--budget", memory=memory)

    @contextlib.contextmanager
    def _in_way(self, way: str) -> Iterator[None]:
        with in_one_way(self.framework, self._model, self._blocks, way, self._plans.get(way)):
            with planner_backend().guarded(self._model, who="bench"):
                yield

    def timed_in_turns(self, ways: Sequence[str]) -> dict[str, list[float]]:
        """Seconds of every way, in rounds: each way runs once in every round, so that a slow minute slows them all."""
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self._args.steps):
            for way in ways:
                with self._in_way(way):
                    seconds[way].append(self.observer.time_one())
        return seconds

    def observed(self, way: str, *, is_first: bool) -> StepRecord:
        """One way. The first way runs its step once more: where it does not give its own gradients again, comparing would
        say nothing.
        """
        profile = None
        if way == "auto":
            profile = self._fitted()
        seen, again = (FirstGradients(self.framework, self._model) for _ in range(2))
        with self._in_way(way):
            record = self.observer.observe(way, what=WAYS[way].what, steps=1, after=seen)
        if is_first:
            with self._in_way(way):
                again(self._step())
            self._compare_with_itself(seen, again)
        if not is_first or again.fingerprint == seen.fingerprint:
            record = dataclasses.replace(record, gradients=seen.fingerprint)
        if profile is None:
            return record
        plan = self._plans[way]
        return dataclasses.replace(record, ops=op_totals(profile, plan), predicted=plan.predicted)

    def _fitted(self) -> Profile:
        """A profile; the plan that was fitted is kept, and taken off the model."""
        args, budget = self._args, self.budget_bytes
        assert budget is not None, "auto is refused without a budget"
        profile = profile_memory(self._model, self._step, blocks=args.blocks, steps=args.steps)
        fitted = fit_memory(self._model, self._step, budget, blocks=args.blocks, profile=profile, steps=args.steps)
        self._plans["auto"] = fitted.plan
        fitted.remove()
        return profile

    def _compare_with_itself(self, seen: FirstGradients, again: FirstGradients) -> None:
        if not seen.fingerprint:
            hint = self.framework.how_to_return_gradients
            self.why_not_compared = f"gradients were not compared: the step shows none; {hint}"
        elif seen.fingerprint != again.fingerprint:
            self.why_not_compared = (
                "gradients were not compared: the first way does not repeat its own (another batch, or ops that add in any "
                f"order); {self.framework.how_to_repeat}"
            )
