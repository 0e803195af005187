"""Broken files against every reader of files from others, as one command.

    python scripts/mutate_files.py --files 100000 --seed 0 --jobs 2 --output out.json

Each file is a good one, broken at random from the outside or from the inside. A reader may refuse it with its own error that
names the file, or give a valid record; anything else is a failure: another exception, a crash, a hang, a write, a started
process. A failing file is kept beside the output. Exit status: 0 no failure, 1 failures, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import pathlib
import platform
import resource
import sys
import tempfile
import time
from typing import Any

from crew import Worker, judged

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHUNK = 500
LIMIT_S = 20.0  # for one file
MEMORY_BYTES = 4 * 2**30  # a file that asks for more than this is refused by the kernel, and must be refused by us


def work(connection: Any, seed: int, address_space: int) -> None:
    """Judge file numbers as they come; runs in a process of its own, so that a crash is only a result."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")
    from security.loaders import attempt, mutated_file

    resource.setrlimit(resource.RLIMIT_DATA, (address_space, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)
        for number in iter(connection.recv, None):
            loader, data = mutated_file(seed, number)
            verdict, why = attempt(loader, data, pathlib.Path(folder))
            if os.listdir(elsewhere):
                verdict, why = "wrong", f"it wrote elsewhere: {os.listdir(elsewhere)}"
            connection.send({"number": number, "kind": verdict, "detail": why, "loader": loader.name})
        os.chdir("/")


def _note_failure(options: argparse.Namespace, reply: dict[str, Any], failures: list[dict[str, Any]]) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
    from security.loaders import mutated_file

    loader, data = mutated_file(options.seed, reply["number"])
    folder = options.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{loader.name}_{options.seed}_{reply['number']}"
    path.write_bytes(data)
    failures.append({"number": reply["number"], "loader": loader.name, "detail": reply["detail"], "file": path.name})


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole run, with a progress bar; the record of it."""
    import torch
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    chunks = collections.deque(
        range(first, min(first + CHUNK, options.files)) for first in range(0, options.files, CHUNK)
    )
    counts: collections.Counter[str] = collections.Counter()
    failures: list[dict[str, Any]] = []
    console = Console(stderr=True)
    started = time.monotonic()
    workers = [
        Worker((options.seed, MEMORY_BYTES), limit_s=LIMIT_S, target=work)
        for _ in range(min(options.jobs, len(chunks)))
    ]
    columns = (TextColumn("files"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("files", total=options.files)
        for _, reply, _ in judged(workers, chunks):
            progress.advance(task)
            counts[f"{reply.get('loader', 'lost')}: {reply['kind']}"] += 1
            if reply["kind"] in ("wrong", "crash"):
                _note_failure(options, reply, failures)
                console.print(f"[red]file {reply['number']}[/]: {reply['detail'][:160]}", highlight=False, markup=True)
    return {
        "schema": 1,
        "files": sum(counts.values()),
        "seed": options.seed,
        "seconds": round(time.monotonic() - started, 1),
        "failures": failures,
        "counts": dict(sorted(counts.items())),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": f"python scripts/mutate_files.py --files {options.files} --seed {options.seed} --jobs {options.jobs}",
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("mutated_files.json"), help="the record")
    options = parser.parse_args()
    if options.files < 1 or options.jobs < 1:
        parser.error("--files and --jobs must be at least 1")
    record = run(options)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{record['files']} files in {record['seconds']:.0f} s: "
        f"{', '.join(f'{count} {name}' for name, count in record['counts'].items())}; "
        f"{len(record['failures'])} failures; {options.output}"
    )
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Not sys.exit: at its end the interpreter would wait without a limit for a worker that even a kill does not end.
    os._exit(status) if multiprocessing.active_children() else sys.exit(status)
