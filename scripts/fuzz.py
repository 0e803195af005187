"""The long run of the program fuzzer, as one command.

    python scripts/fuzz.py --programs 20000 --seed 0 --jobs 2 --output out.json
    python scripts/fuzz.py --programs 500 --device cuda --output gpu.json
    python scripts/fuzz.py --programs 300 --territory foreign --output foreign.json

Every program runs with and without us, on the simulated accelerator or on a real device with slowed copies, and must give
the same bytes. A territory is what programs are made of: ``first`` is that of the first recorded runs, ``wide`` has everything,
the others have much of one thing. Run it again with the same output to go on where it stopped. Each failure is shrunk and
written as a stand-alone script beside the output. Exit status: 0 no failure, 1 failures, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import multiprocessing
import os
import pathlib
import platform
import sys
import time
from typing import Any

from crew import Worker, judged

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHUNK = 50  # programs per unit of work, and of resumption
SHRINK_TRIES = 600
MOST_SHRUNK = 3  # failures of one kind that each process shrinks; the rest is written as it is
FAILURES = ("mismatch", "crash")
LIMIT_S = 120.0  # for one program; a hang is a failure like any other


# ------------------------------------------------------------------ the worker


def work(connection: Any, seed: int, territory: str, device: str, shrink_s: float) -> None:
    """Judge program numbers as they come; runs in a process of its own, so that a crash is only a result."""
    _prepare(device)
    from fuzz.generate import program_number
    from fuzz.oracle import judge, signature
    from fuzz.source import program_to_script

    shrunk: collections.Counter[str] = collections.Counter()
    for number in iter(connection.recv, None):
        program = program_number(seed, number, territory)
        started = time.perf_counter()
        verdict = judge(program, device)
        reply = {
            "number": number,
            "kind": verdict.kind,
            "detail": verdict.detail,
            "features": verdict.features,
            "seconds": time.perf_counter() - started,
            "script": None,
        }
        if not verdict.is_good:
            shrunk[signature(verdict.detail)] += 1
            is_new = shrink_s > 0 and shrunk[signature(verdict.detail)] <= MOST_SHRUNK
            smaller = _shrunk(program, verdict.detail, device, shrink_s) if is_new else program
            title = (
                f"Program {number} of seed {seed} in {territory!r}. {judge(smaller, device).detail or verdict.detail}"
            )
            reply["script"] = program_to_script(smaller, title)
        connection.send(reply)


def _prepare(device: str) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    os.environ.setdefault("HYPER_PARALLEL_SUMMARY", "0")  # each program is somebody's first step
    from fuzz import harness

    harness.prepare(device)


def _shrunk(program: Any, detail: str, device: str, shrink_s: float) -> Any:
    from fuzz.oracle import judge, signature
    from fuzz.shrink import shrink

    wanted = signature(detail)
    deadline = time.monotonic() + shrink_s

    def still_fails(candidate: Any) -> bool:
        if time.monotonic() > deadline:
            return False
        verdict = judge(candidate, device)
        return not verdict.is_good and signature(verdict.detail) == wanted

    return shrink(program, still_fails, most_tries=SHRINK_TRIES)


# ------------------------------------------------------------------ the summary


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What the run has shown so far; the whole content of the output file."""

    seed: int
    device: str
    territory: str = "first"  # where a file does not say: there was no other
    programs: int = 0
    seconds: float = 0.0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    features: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refusals: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # right without us, and we raise: allowed
    done: list[list[int]] = dataclasses.field(default_factory=list)  # [first, last] program numbers
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def begun(cls, path: pathlib.Path, seed: int, device: str, territory: str) -> Summary:
        """The summary in ``path``, if it is of the same run, else a new one."""
        if not path.exists():
            return cls(seed=seed, device=device, territory=territory, versions=_versions(device))
        data = json.loads(path.read_text())
        known = data["seed"], data["device"], data.get("territory", "first")
        if known != (seed, device, territory):
            raise SystemExit(
                "fuzz: cannot go on with {}: it is of seed {} on {} in {}, asked for seed {} on {} in {}. Name another "
                "output.".format(path, *known, seed, device, territory)
            )
        data.pop("schema")
        data.pop("mismatches")
        data["kinds"] = collections.Counter(data["kinds"])
        data["features"] = collections.Counter(data["features"])
        return cls(**data)

    def todo(self, programs: int) -> collections.deque[list[int]]:
        """The numbers below ``programs`` that are not done, in chunks."""
        done = {number for first, last in self.done for number in range(first, last + 1)}
        left = [number for number in range(programs) if number not in done]
        return collections.deque(left[start : start + CHUNK] for start in range(0, len(left), CHUNK))

    def add(self, replies: list[dict[str, Any]]) -> None:
        """Count one finished chunk."""
        for reply in replies:
            self.programs += 1
            self.seconds += reply.get("seconds", 0.0)  # a process that was lost tells no more than that
            self.kinds[reply["kind"]] += 1
            self.features.update(reply.get("features", ()))
            if reply["kind"] == "refused":
                self.refusals.append({"number": reply["number"], "detail": reply["detail"]})
        self.done += [[reply["number"], reply["number"]] for reply in replies]
        self.done = _joined(self.done)

    def write(self, path: pathlib.Path) -> None:
        """Replace the file in one step, so that an interruption leaves the old one or the new one."""
        data: dict[str, Any] = {"schema": 1, "mismatches": len(self.failures)}
        data |= {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        data["features"] = dict(sorted(self.features.items()))
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(data, indent=1))
        beside.replace(path)


def _joined(ranges: list[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined


def _versions(device: str) -> dict[str, str]:
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device != "cpu":
        versions["device"] = torch.cuda.get_device_name()
    return versions


# ------------------------------------------------------------------ the run


def run(options: argparse.Namespace) -> Summary:
    """The whole run, with a progress bar."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    summary = Summary.begun(options.output, options.seed, options.device, options.territory)
    chunks = summary.todo(options.programs)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    shrink_s = 0.0 if options.no_shrink else options.limit_s / 2  # the answer must come before the limit
    workers = [
        Worker((options.seed, options.territory, options.device, shrink_s), limit_s=options.limit_s, target=work)
        for _ in range(min(options.jobs, len(chunks)))
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("programs", total=options.programs, completed=summary.programs)
        for worker, reply, is_last in judged(workers, chunks):
            progress.advance(task)
            if reply["kind"] in FAILURES:
                _note_failure(summary, reply, options)
                console.print(
                    f"[red]program {reply['number']}[/]: {reply['detail'].splitlines()[-1][:150]}", highlight=False
                )
                progress.update(task, description=f"[red]{len(summary.failures)} mismatches[/]")
            if is_last:
                summary.add(worker.replies)
                summary.write(options.output)
    return summary


def _note_failure(summary: Summary, reply: dict[str, Any], options: argparse.Namespace) -> None:
    folder = options.output.with_suffix("")
    path = None
    if reply.get("script") is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"program_{options.seed}_{reply['number']}.py"
        path.write_text(reply["script"])
    known = {failure["number"] for failure in summary.failures}
    if reply["number"] not in known:
        summary.failures.append(
            {
                "number": reply["number"],
                "detail": reply["detail"],
                "script": None if path is None else os.path.relpath(path, options.output.parent),
            }
        )


def _territories() -> list[str]:
    sys.path[:0] = [str(ROOT / "tests")]
    from fuzz.territory import TERRITORIES

    return list(TERRITORIES)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("fuzz.json"), help="summary, also to go on from"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the simulated accelerator")
    parser.add_argument("--territory", choices=_territories(), default="wide", help="what programs are made of")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for one program; then it is a failure")
    parser.add_argument("--no-shrink", action="store_true", help="write failures as they are")
    options = parser.parse_args()
    if options.programs < 1 or options.jobs < 1 or options.limit_s <= 0:
        parser.error("--programs and --jobs must be at least 1, --limit-s must be positive")
    summary = run(options)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.kinds.items()))
    print(
        f"{summary.programs} programs in {summary.seconds:.0f} s of work: {found}; {len(summary.features)} features; "
        f"{options.output}"
    )
    return 1 if summary.failures else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not sys.exit: at its end the interpreter would wait without a limit for a worker that even a kill does not end.
    os._exit(status) if multiprocessing.active_children() else sys.exit(status)
