"""The long run of the program fuzzer, as one command.

    python scripts/fuzz.py --programs 20000 --seed 0 --jobs 2 --output out.json
    python scripts/fuzz.py --programs 500 --device cuda --output gpu.json
    python scripts/fuzz.py --programs 300 --territory foreign --output foreign.json
    python scripts/fuzz.py --programs 2000 --platform mindspore --output mindspore.json

Every program runs with and without us, on the simulated accelerator or on a real device with slowed copies, and must give
the same bytes. A territory is what programs are made of: ``first`` is that of the first recorded runs, ``wide`` has everything,
the others have much of one thing. MindSpore has programs of its own, in one territory, and runs in its own environment. Run it
again with the same output to go on where it stopped. Each failure is shrunk and written beside the output: as a stand-alone
script or, on MindSpore, as data for ``--replay FILE``. Exit status: 0 no failure, 1 failures, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from crew import Worker, judged

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHUNK = 50  # programs per unit of work, and of resumption
SHRINK_TRIES = 600
MOST_SHRUNK = 3  # failures of one kind that each process shrinks; the rest is written as it is
FAILURES = ("mismatch", "crash")
LIMIT_S = 120.0  # for one program; a hang is a failure like any other


# ------------------------------------------------------------------ the worker


def work(
    connection: Any, seed: int, territory: str, device: str, shrink_s: float, platform_name: str = "torch"
) -> None:
    """Judge program numbers as they come; runs in a process of its own, so that a crash is only a result."""
    fuzzer = _fuzzer(platform_name, territory, device)
    shrunk: collections.Counter[str] = collections.Counter()
    for number in iter(connection.recv, None):
        program = fuzzer.program(seed, number)
        started = time.perf_counter()
        verdict = fuzzer.judge(program)
        reply = {
            "number": number,
            "kind": verdict.kind,
            "detail": verdict.detail,
            "features": verdict.features,
            "seconds": time.perf_counter() - started,
            "script": None,
        }
        if not verdict.is_good:
            shrunk[fuzzer.signature(verdict.detail)] += 1
            is_new = shrink_s > 0 and shrunk[fuzzer.signature(verdict.detail)] <= MOST_SHRUNK
            smaller = _shrunk(fuzzer, program, verdict.detail, shrink_s) if is_new else program
            detail = fuzzer.judge(smaller).detail or verdict.detail
            reply["script"] = fuzzer.text(smaller, f"Program {number} of seed {seed} in {territory!r}. {detail}")
        connection.send(reply)


@dataclasses.dataclass(frozen=True)
class _Fuzzer:
    """What differs between the frameworks."""

    program: Callable[[int, int], Any]  # of a seed and a number
    judge: Callable[[Any], Any]
    signature: Callable[[str], str]
    text: Callable[[Any, str], str]  # of a failure, for people


def _fuzzer(platform_name: str, territory: str, device: str) -> _Fuzzer:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    os.environ.setdefault("HYPER_PARALLEL_SUMMARY", "0")  # each program is somebody's first step
    return _fuzzer_of_mindspore() if platform_name == "mindspore" else _fuzzer_of_torch(territory, device)


def _fuzzer_of_torch(territory: str, device: str) -> _Fuzzer:
    from fuzz import harness
    from fuzz.generate import program_number
    from fuzz.oracle import judge, signature
    from fuzz.source import program_to_script

    harness.prepare(device)
    return _Fuzzer(
        program=lambda seed, number: program_number(seed, number, territory),
        judge=lambda program: judge(program, device),
        signature=signature,
        text=program_to_script,
    )


def _fuzzer_of_mindspore() -> _Fuzzer:
    os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"
    from fuzz.program import to_json
    from on_mindspore.fuzzing.generate import program_number
    from on_mindspore.fuzzing.judge import judge, prepare, signature

    prepare()
    return _Fuzzer(
        program=program_number, judge=judge, signature=signature, text=lambda program, title: to_json(program) + "\n"
    )


def _shrunk(fuzzer: _Fuzzer, program: Any, detail: str, shrink_s: float) -> Any:
    from fuzz.shrink import shrink

    wanted = fuzzer.signature(detail)
    deadline = time.monotonic() + shrink_s

    def still_fails(candidate: Any) -> bool:
        if time.monotonic() > deadline:
            return False
        verdict = fuzzer.judge(candidate)
        return not verdict.is_good and fuzzer.signature(verdict.detail) == wanted

    return shrink(program, still_fails, most_tries=SHRINK_TRIES)


# ------------------------------------------------------------------ the summary


@dataclasses.dataclass(kw_only=True)
class Summary:
    """What the run has shown so far; the whole content of the output file."""

    seed: int
    device: str
    territory: str = "first"  # where a file does not say: there was no other
    platform: str = "torch"
    programs: int = 0
    seconds: float = 0.0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    features: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    refusals: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # right without us, and we raise: allowed
    done: list[list[int]] = dataclasses.field(default_factory=list)  # [first, last] program numbers
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def begun(cls, path: pathlib.Path, options: argparse.Namespace) -> Summary:
        """The summary in ``path``, if it is of the same run, else a new one."""
        wanted = options.seed, options.device, options.territory, options.platform
        if not path.exists():
            versions = _versions(options.device, options.platform)
            return cls(**dict(zip(("seed", "device", "territory", "platform"), wanted)), versions=versions)
        data = json.loads(path.read_text())
        known = data["seed"], data["device"], data.get("territory", "first"), data.get("platform", "torch")
        if known != wanted:
            words = "seed {} on {} in {} with {}"
            raise SystemExit(
                f"fuzz: cannot go on with {path}: it is of {words.format(*known)}, asked for {words.format(*wanted)}. Name "
                "another output."
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


def _versions(device: str, platform_name: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    if platform_name == "mindspore":
        return {**versions, "mindspore": importlib.metadata.version("mindspore")}
    import torch

    versions["torch"] = torch.__version__
    if device != "cpu":
        versions["device"] = torch.cuda.get_device_name()
    return versions


# ------------------------------------------------------------------ the run


def run(options: argparse.Namespace) -> Summary:
    """The whole run, with its progress."""
    summary = Summary.begun(options.output, options)
    chunks = summary.todo(options.programs)
    shrink_s = 0.0 if options.no_shrink else options.limit_s / 2  # the answer must come before the limit
    arguments = (options.seed, options.territory, options.device, shrink_s, options.platform)
    workers = [Worker(arguments, limit_s=options.limit_s, target=work) for _ in range(min(options.jobs, len(chunks)))]
    with _progress(options.programs, summary.programs) as (advance, say):
        for worker, reply, is_last in judged(workers, chunks):
            advance(len(summary.failures))
            if reply["kind"] in FAILURES:
                _note_failure(summary, reply, options)
                say(f"program {reply['number']}: {(reply['detail'].splitlines() or ['?'])[-1][:150]}")
            if is_last:
                summary.add(worker.replies)
                summary.write(options.output)
    return summary


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar that advances by one program, and a line above it; lines alone where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield (lambda mismatches: None), (lambda line: print(line, file=sys.stderr, flush=True))
        return
    console = Console(stderr=True)
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *bar, console=console) as progress:
        task = progress.add_task("programs", total=total, completed=done)

        def advance(mismatches: int) -> None:
            description = f"[red]{mismatches} mismatches[/]" if mismatches else "programs"
            progress.update(task, advance=1, description=description)

        yield advance, (lambda line: console.print(line, style="red", markup=False, highlight=False))


def _note_failure(summary: Summary, reply: dict[str, Any], options: argparse.Namespace) -> None:
    folder = options.output.with_suffix("")
    path = None
    if reply.get("script") is not None:
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "json" if options.platform == "mindspore" else "py"
        path = folder / f"program_{options.seed}_{reply['number']}.{suffix}"
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


def _territories(platform_name: str) -> list[str]:
    if platform_name == "mindspore":
        return ["wide"]
    sys.path[:0] = [str(ROOT / "tests")]
    from fuzz.territory import TERRITORIES

    return list(TERRITORIES)


def replay(path: pathlib.Path) -> int:
    """Judge one program of MindSpore that is written down."""
    fuzzer = _fuzzer("mindspore", "wide", "cpu")
    from fuzz.program import from_json

    verdict = fuzzer.judge(from_json(path.read_text()))
    print(verdict.kind, verdict.detail, sep="\n")
    return 0 if verdict.is_good else 1


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
    parser.add_argument("--platform", choices=("torch", "mindspore"), default="torch", help="the framework")
    parser.add_argument("--territory", default="wide", help="what programs are made of")
    parser.add_argument("--replay", type=pathlib.Path, metavar="FILE", help="judge a failure of MindSpore again")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for one program; then it is a failure")
    parser.add_argument("--no-shrink", action="store_true", help="write failures as they are")
    options = parser.parse_args()
    if options.programs < 1 or options.jobs < 1 or options.limit_s <= 0:
        parser.error("--programs and --jobs must be at least 1, --limit-s must be positive")
    if options.platform == "mindspore" and options.device != "cpu":
        parser.error("--platform mindspore runs on the simulated accelerator: --device cpu")
    if options.replay is not None:
        return replay(options.replay)
    territories = _territories(options.platform)
    if options.territory not in territories:
        parser.error(f"--territory {options.territory}: with {options.platform} there are {', '.join(territories)}")
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
