"""Train a small language model under a memory budget, four ways, and compare.

none, recompute, swap and auto (the planner's choice for the budget): peak, step time, bytes moved, and whether all gradients
are the same, bit for bit. Times are medians of rounds in which the ways take turns. On a machine with a GPU swapped values go
to pinned memory; without one the device is RAM and far memory is a file, so that the memory of the process really falls (on
MindSpore it does not, and the simulated accelerator counts it). The memory of each way is measured in a process of its own.

Example::

  hyper-parallel demo -o demo --budget 400MiB
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel._version import __version__
from hyper_parallel.backends.demo_training import SIZES, DemoPlan, DemoTraining, demo_training
from hyper_parallel.cli.console import Console, Progress
from hyper_parallel.cli.factory import positive
from hyper_parallel.cli.failures import CommandError, UsageError
from hyper_parallel.cli.framework import add_platform_argument, not_chosen, require_framework
from hyper_parallel.cli.report import show_run
from hyper_parallel.cli.steps_done import add_step, watched_steps
from hyper_parallel.config import show_bytes
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner.budget import check_budget
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.planner.profile import Profile
from hyper_parallel.platform.platform import HYPER_PARALLEL_PLATFORM
from hyper_parallel.records.record_files import as_json
from hyper_parallel.records.run_record import RunRecord, StepRecord
from hyper_parallel.records.versions import Versions
from hyper_parallel.report.figure import write_figure
from hyper_parallel.report.page import write_page
from hyper_parallel.report.trace import write_run_trace

__all__ = ["add_arguments", "run"]

_PLAN: Final = "plan"
_TIMES: Final = "times"
_STAGES: Final[Mapping[str, str]] = {  # in order: what is said of each
    "none": "training: none",
    _PLAN: "profiling and planning",
    "recompute": "training: recompute",
    "swap": "training: swap",
    "auto": "training: auto",
    _TIMES: "timing: the four ways in turns",
}
_START_STEPS: Final = 3  # how many steps a process takes to start
_PLAN_STEPS: Final = 25  # about as many are run to profile and plan
_WAYS: Final = ("none", "recompute", "swap", "auto")
_TIME_LIMIT_S: Final = 900
_EFFORT: Final = 0.3  # of a second search
_ABOVE_SMALLEST: Final = 1.1
_PROCESSOR: Final = "processor time of a step"
_STEPS_FILE: Final = "steps-done"
_WARMUP_STEPS: Final = 1
_OBSERVED_STEPS: Final = 1  # of each way, in a process of its own, for its memory
# Large blocks return to the system when they are freed, so that the memory of the process is that of its tensors.
# Threads that wait take no processor time, so that processor time is that of work.
_WAITING: Final[Mapping[str, str]] = {"OMP_WAIT_POLICY": "PASSIVE"}
_ALLOCATOR: Final[Mapping[str, str]] = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
_SAME_SUMS: Final[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # matrix products that can be repeated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "-o", "--output", metavar="DIR", default="hyper-parallel-demo", help="default hyper-parallel-demo"
    )
    parser.add_argument("--budget", metavar="BYTES", help="for auto; half of what the step takes by default")
    parser.add_argument(
        "--steps", type=positive, default=3, metavar="N", help="how many times each way is timed, in turns (default 3)"
    )
    parser.add_argument("--disk-path", metavar="DIR", help="where swapped values go on machines without a GPU")
    parser.add_argument("--size", choices=tuple(SIZES), help="how large a model; chosen by the machine by default")
    add_platform_argument(parser)
    parser.add_argument("--steps-file", type=Path, help=argparse.SUPPRESS)  # gets a byte for every step
    parser.add_argument("--one", choices=(*_STAGES,), help=argparse.SUPPRESS)  # one way, in this very process


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    if args.budget is not None:
        try:
            check_budget(args.budget, name="--budget")
        except ValueError as error:
            raise UsageError(str(error)) from None
    if args.disk_path is not None and not Path(args.disk_path).is_dir():
        raise UsageError(f"--disk-path: there is no folder {args.disk_path}; name one on the disk to use")
    framework = require_framework()  # says what is missing before anything is started or written
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    if args.one is not None:
        _run_one(args, folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-", dir=args.disk_path) as disk:
        shares = [_START_STEPS + _steps_of(stage, args) for stage in _STAGES]
        with console.progress("demo", len(_STAGES), shares=shares) as progress:
            for stage, words in _STAGES.items():
                progress(words)
                _run_watched(framework, stage, args, folder, disk, progress)
                if stage == "auto" and _planned_again(args, folder):
                    _run_watched(framework, stage, args, folder, disk, progress)
    record = _collected(args, folder)
    record.save(folder / "run.json")
    write_page(folder / "report.html", record)
    write_figure(folder / "figure.svg", record)
    write_run_trace(folder / "trace.json", record)
    are_equal = all(record.are_gradients_equal(step) for step in record.steps)
    console.data(_figures(record, folder, are_equal=are_equal))
    show_run(record, console)
    for line in _story(record):
        console.say(line)
    if not_chosen():
        console.say(not_chosen())
    console.say(f"report: {folder / 'report.html'} (also run.json, plan.json, figure.svg, trace.json)")
    if not are_equal:
        raise CommandError(f"the gradients of the ways differ; please report this with {folder / 'run.json'}")
    return 0


def _story(record: RunRecord) -> list[str]:
    """What the table shows, in words: whether the budget was kept, and what that cost."""
    by_name = {step.name: step for step in record.steps}
    auto, none, recompute = by_name["auto"], by_name["none"], by_name["recompute"]
    lines = []
    if record.budget_bytes is not None:
        kept = "kept" if auto.peak_bytes <= record.budget_bytes else "not kept"
        lines.append(
            f"auto: the budget of {show_bytes(record.budget_bytes)} was {kept}: peak {show_bytes(auto.peak_bytes)} instead of "
            f"{show_bytes(none.peak_bytes)}"
        )
    for other, words in ((none, "the plain step"), (recompute, "recomputing everything")):
        change = auto.time_change(other)
        how = (
            "no difference was measured"
            if change is None
            else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
        )
        lines.append(f"auto against {words}: {how}")
    return [*lines, *(note for note in record.notes if note.startswith(_PROCESSOR))]


def _processor_notes(seconds: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Processor time beside the plain step's, in every round: what can be said of a machine that others use too."""
    if not seconds:
        return ()
    ratios = {way: [one / plain - 1 for one, plain in zip(seconds[way], seconds["none"])] for way in _WAYS[1:]}
    shown = ", ".join(
        f"{way} {statistics.median(found):+.0%} ({min(found):+.0%} to {max(found):+.0%})"
        for way, found in ratios.items()
    )
    return (f"{_PROCESSOR} beside the plain one's, which other programs hardly change: {shown}",)


def _steps_of(stage: str, args: argparse.Namespace) -> float:
    """About how many steps a stage runs."""
    one_way = _WARMUP_STEPS + _OBSERVED_STEPS + 1  # the last one is watched
    by_stage: dict[str, float] = {_PLAN: _PLAN_STEPS, _TIMES: args.steps * len(_WAYS) * (_WARMUP_STEPS + 1)}
    return by_stage.get(stage, float(one_way))


def _run_watched(
    framework: str, stage: str, args: argparse.Namespace, folder: Path, disk: str, progress: Progress
) -> None:
    steps = _steps_of(stage, args)

    def tell(done: int) -> None:
        progress.reach((_START_STEPS + min(done, steps)) / (_START_STEPS + steps))

    file = Path(disk) / _STEPS_FILE
    with watched_steps(file, tell):
        _run_apart(framework, stage, args, folder, disk, file)


def _run_apart(framework: str, stage: str, args: argparse.Namespace, folder: Path, disk: str, steps_file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hyper_parallel.cli",
        "demo",
        "--one",
        stage,
        "-o",
        str(folder),
        "--disk-path",
        disk,
        "--steps-file",
        str(steps_file),
    ]
    command += ["--steps", str(args.steps if stage == _TIMES else _OBSERVED_STEPS)]
    for name, value in (("--budget", args.budget), ("--size", args.size)):
        command += [name, value] if value is not None else []
    environment = {**_ALLOCATOR, **_WAITING, **_SAME_SUMS, **os.environ, HYPER_PARALLEL_PLATFORM: framework}
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{stage} took longer than {_TIME_LIMIT_S} s; try --size tiny") from None
    if finished.returncode != 0:
        said = finished.stderr.strip() or f"exit code {finished.returncode}"
        raise CommandError(f"{stage} failed: {said if args.traceback else said.splitlines()[-1]}")


def _run_one(args: argparse.Namespace, folder: Path) -> None:
    training = demo_training(functools.partial(add_step, args.steps_file))
    size = training.size(args.size)
    disk = args.disk_path or tempfile.gettempdir()
    if args.one == _PLAN:
        alone = StepRecord.load(folder / "none.json")
        made = training.plan_demo(size, budget=args.budget, disk_path=disk, alone=alone)
        made.plan.save(folder / "plan.json")
        made.profile.save(folder / "profile.json")
        return
    if args.one == _TIMES:
        plan = Plan.load(folder / "plan.json")
        times = training.time_in_turns(size, disk_path=disk, rounds=args.steps, plan=plan)
        (folder / "times.json").write_text(json.dumps(dataclasses.asdict(times)))
        return
    planned = None
    if args.one == "auto":
        profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
        planned = DemoPlan(profile=profile, plan=plan)
    step = training.train(args.one, size, disk_path=disk, steps=args.steps, planned=planned)
    step.save(folder / f"{args.one}.json")
    if planned is not None:
        planned.plan.save(folder / "plan.json")
    (folder / "settings.json").write_text(json.dumps(training.settings_in_words(size, disk)))


def _planned_again(args: argparse.Namespace, folder: Path) -> bool:
    """Plan again with what was measured, where the budget was not kept; whether there is another plan now.

    On an accelerator ``fit_memory`` has done so already. A default budget is raised to what can be kept.
    """
    profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
    measured = StepRecord.load(folder / "auto.json").model_peak_bytes
    if measured <= plan.budget_bytes:
        return False
    corrections = plan.corrections.after(plan, measured_peak_bytes=measured, measured_step_seconds=None)
    try:
        again = plan_memory(profile, plan.budget_bytes, corrections=corrections, effort=_EFFORT)
    except BudgetTooSmallError as error:
        if args.budget is not None or error.smallest_peak_bytes is None:
            return False
        budget = int(error.smallest_peak_bytes * _ABOVE_SMALLEST)
        again = plan_memory(profile, budget, corrections=corrections, effort=_EFFORT)
    again.save(folder / "plan.json")
    return True


def _collected(args: argparse.Namespace, folder: Path) -> RunRecord:
    profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
    training = demo_training()
    size = training.size(args.size)
    versions: Versions = dataclasses.replace(profile.versions, library_version=__version__)
    settings = json.loads((folder / "settings.json").read_text())
    if not training.framework.has_accelerator():
        versions = dataclasses.replace(versions, device=f"CPU ({platform.machine()}, {os.cpu_count()} cores)")
        settings["disk_path"] = "a temporary directory"
    times = json.loads((folder / "times.json").read_text())
    steps = [StepRecord.load(folder / f"{way}.json").timed(times["seconds"][way]) for way in _WAYS]
    notes = (*_notes(training, steps), *_processor_notes(times["processor_seconds"]))
    steps = [
        step.without_process() for step in steps
    ]  # the budget is about the model's own memory: peaks and curves are too
    for name in (*(f"{way}.json" for way in _WAYS), "settings.json", "times.json"):
        (folder / name).unlink()
    return RunRecord(
        title=f"A language model of {size.layers} layers, {size.batch} × {size.length} tokens, four ways",
        created=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        versions=versions,
        memory_kind=_memory_kind(training),
        budget_bytes=plan.budget_bytes,
        settings=settings,
        machine={"system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count())},
        steps=tuple(steps),
        notes=notes,
    )


def _memory_kind(training: DemoTraining) -> str:
    if training.counts_resident_memory:
        return "resident memory of the model"
    return "simulated device memory" if training.counts_simulated_memory else "device memory"


def _notes(training: DemoTraining, steps: Sequence[StepRecord]) -> tuple[str, ...]:
    """What the figures are of, where that is no accelerator."""
    if training.counts_simulated_memory:
        return (training.framework.why_simulated,)
    if not training.counts_resident_memory:
        return ()
    process = show_bytes(max(step.process_bytes for step in steps))
    return (
        "bytes of single values were counted on the simulated accelerator; plans were measured on this machine",
        f"the {process} that Python and torch take without a model are left out of all figures",
    )


def _figures(record: RunRecord, folder: Path, *, are_equal: bool) -> dict[str, Any]:
    names = (
        "name",
        "peak_bytes",
        "model_peak_bytes",
        "step_seconds",
        "seconds",
        "out_bytes",
        "back_bytes",
        "exposed_seconds",
        "losses",
    )
    return {
        "device": record.versions.device,
        "memory_kind": record.memory_kind,
        "budget_bytes": record.budget_bytes,
        "are_gradients_equal": are_equal,
        "ways": [{name: as_json(getattr(step, name)) for name in names} for step in record.steps],
        "report": str(folder / "report.html"),
        "record": str(folder / "run.json"),
    }
