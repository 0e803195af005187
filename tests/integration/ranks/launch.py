"""Runs one check of ``worker.py``, or of a module like it, in several real processes, and says how each of them ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

LIMIT_S: Final = 900  # ends a hang, and measures nothing

_OF_LAUNCHERS: Final = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "RANK", "WORLD_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """One process after its end."""

    code: int  # negative: the signal that ended it
    output: str
    said: Any  # what it wrote down as JSON; None: nothing


def launch(check: str, size: int, place: Path, *, module: str = "worker", **environment: str) -> list[Ended]:
    """Run ``check_<check>`` of a module on every rank; ``environment`` is added to theirs."""
    package = __package__ or ""
    search = Path(__file__).resolve().parents[package.count(".") + 1]
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    variables = inherited | {
        "PYTHONPATH": os.pathsep.join([str(search), str(search.parents[1])]),
        "HYPER_PARALLEL_PLATFORM": "torch",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    outputs = [(place / f"output-{rank}").open("w+") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"{package}.{module}", check, str(place), str(rank), str(size)],
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        for rank, output in enumerate(outputs)
    ]
    deadline = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for output in outputs:
            output.close()
    return [_ended(place, rank, process.returncode) for rank, process in enumerate(processes)]


def _ended(place: Path, rank: int, code: int) -> Ended:
    said = place / f"said-{rank}"
    return Ended(
        code=code,
        output=(place / f"output-{rank}").read_text(),
        said=json.loads(said.read_text()) if said.exists() else None,
    )
