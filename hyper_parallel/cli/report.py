"""Draw a recorded run: one HTML file, and if asked a figure (SVG, PNG) and a Chrome trace.

Run records are written by `demo` and `bench`. The page needs no network; print it for paper. A PNG needs
`pip install resvg_py`.

Example::

  hyper-parallel report run.json -o report.html --svg figure.svg --png figure.png --trace trace.json
"""

from __future__ import annotations

import argparse

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.failures import CommandError
from hyper_parallel.config import show_bytes
from hyper_parallel.errors import MissingPackageError
from hyper_parallel.fates import Fate
from hyper_parallel.records.run_record import RunRecord, StepRecord, shown_names
from hyper_parallel.report.bitmap import write_bitmap
from hyper_parallel.report.figure import write_figure
from hyper_parallel.report.page import write_page
from hyper_parallel.report.trace import write_run_trace
from hyper_parallel.report.words import show_peak_change, show_time, show_time_change

__all__ = ["add_arguments", "region_lines", "run", "show_run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("record", metavar="RUN", help="a run.json")
    parser.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default report.html")
    parser.add_argument("--svg", metavar="FILE", help="also a figure for papers")
    parser.add_argument("--png", metavar="FILE", help="the same figure as a bitmap")
    parser.add_argument("--timeline-of", metavar="WAY", help="whose timeline the figure shows; the last by default")
    parser.add_argument("--trace", metavar="FILE", help="also a trace for chrome://tracing and ui.perfetto.dev")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    record = RunRecord.load(args.record)
    written = [args.output]
    missing: MissingPackageError | None = None
    write_page(args.output, record)
    if args.svg is not None:
        write_figure(args.svg, record, timeline_of=args.timeline_of)
        written.append(args.svg)
    if args.trace is not None:
        write_run_trace(args.trace, record)
        written.append(args.trace)
    if args.png is not None:
        try:
            write_bitmap(args.png, record, timeline_of=args.timeline_of)
            written.append(args.png)
        except MissingPackageError as error:
            missing = error
    console.data({"written": written})
    show_run(record, console)
    console.say(f"written: {', '.join(written)}")
    if missing is not None:
        raise CommandError(f"{args.png} was not written: {missing}")
    return 0


def show_run(record: RunRecord, console: Console) -> None:
    """Every way of a run in one table."""
    first = record.steps[0]
    rows = []
    for step in record.steps:
        are_equal = record.are_gradients_equal(step)
        rows.append(
            [
                step.name,
                show_bytes(step.peak_bytes),
                "" if step is first else show_peak_change(step, first),
                show_time(step),
                "" if step is first else show_time_change(step, first),
                f"{show_bytes(step.out_bytes)} / {show_bytes(step.back_bytes)}" if step.out_bytes else "-",
                "not compared" if are_equal is None else "bitwise equal" if are_equal else "DIFFERENT",
            ]
        )
    heads = ("way", "peak", "", "step", "", "moved out / back", "gradients")
    console.table(f"{record.title} ({record.versions.device}, {record.memory_kind})", heads, rows)
    for step in record.steps:
        # A value that stayed and could have left has a reason; one that a policy saved has none.
        stayed = [total for total in step.fates if total.fate is Fate.SAVE and total.reason]
        kept = {total.reason: total.nbytes for total in stayed if total.nbytes}
        if kept and not step.out_bytes:
            reasons = ", ".join(f"{reason} {show_bytes(kept[reason])}" for reason in sorted(kept))
            console.say(f"{step.name}: nothing was swapped; stayed where it was: {reasons}")
        for line in region_lines(step):
            console.say(f"{step.name}: {line}")


def region_lines(step: StepRecord) -> list[str]:
    """How the recomputed regions of a step are made again: a line for each way and reason."""
    lines = []
    for total in step.regions:
        regions, verb = ("1 region", "runs") if total.count == 1 else (f"{total.count} regions", "run")
        how = f"Python again: {total.reason}" if total.reason else "from a tape"
        names = f" ({shown_names(total.names)})" if total.names else ""
        lines.append(f"{regions} {verb} {how}{names}")
    return lines
