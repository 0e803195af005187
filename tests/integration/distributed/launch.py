"""Running a file of checks in two processes, with a hard limit, and keeping each check's verdict.

A check is a function ``check_*(world)`` of one module; the checks of a module run in order in one launch, because
importing torch costs more than most of them. After a failure the world is in no known state and the launch ends; the
checks that were left have no verdict yet.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

WORLD_SIZE: Final = 2
COLLECTIVE_LIMIT_S: Final = 200
LAUNCH_LIMIT_S: Final = 1000

PASSED: Final = "passed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What a check gets."""

    rank: int
    size: int
    place: Path


def check_names(module: str) -> list[str]:
    """The checks of a module, in the order in which they are written."""
    found = inspect.getmembers(importlib.import_module(f"{__package__}.{module}"), inspect.isfunction)
    checks = [(function.__code__.co_firstlineno, name) for name, function in found if name.startswith("check_")]
    return [name for _, name in sorted(checks)]


def run_checks(module: str, names: list[str]) -> dict[str, str]:
    """The verdict of each check up to the first failure: ``passed``, or everything that is known about it."""
    assert __package__ is not None
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        search_path = Path(__file__).resolve().parents[__package__.count(".") + 1]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(search_path), str(search_path.parents[1]), *_python_path()]),
            "HYPER_PARALLEL_PLATFORM": "torch",
            "OMP_NUM_THREADS": "1",
        }
        outputs = [(place / f"output-{rank}").open("w+") for rank in range(WORLD_SIZE)]
        command = [sys.executable, "-m", f"{__package__}.worker", module, ",".join(names), folder]
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=output, stderr=output, start_new_session=True
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            is_late = _wait(processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for output in outputs:
            output.close()
        return _verdicts(place, names, is_late=is_late)


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _wait(processes: list[subprocess.Popen[bytes]]) -> bool:
    """True when the limit passed first. One that failed gives the others a collective's time to notice."""
    deadline = time.monotonic() + LAUNCH_LIMIT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return False
        if any(code not in (None, 0) for code in codes):
            deadline = min(deadline, time.monotonic() + COLLECTIVE_LIMIT_S + 5)
        time.sleep(0.05)
    return True


def _verdicts(place: Path, names: list[str], *, is_late: bool) -> dict[str, str]:
    verdicts: dict[str, str] = {}
    for name in names:
        parts = [place / f"{name}-{rank}" for rank in range(WORLD_SIZE)]
        texts = [part.read_text() if part.exists() else "no verdict" for part in parts]
        if all(text == PASSED for text in texts):
            verdicts[name] = PASSED
            continue
        output = "".join(f"\n--- output of rank {r} ---\n{(place / f'output-{r}').read_text()}" for r in (0, 1))
        late = f"\nended after the limit of {LAUNCH_LIMIT_S} s" if is_late else ""
        verdicts[name] = "".join(f"\n--- rank {r} ---\n{text}" for r, text in enumerate(texts)) + late + output
        break
    return verdicts
