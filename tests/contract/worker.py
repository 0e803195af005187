"""The processes of a ranked job: ``python -m <package>.worker PLACE LIMIT_S`` forks one per rank."""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from hyper_parallel.platform.platform import Platform

from .adapters import COLLECTIVE_TIMEOUT_S, Adapter, adapter_named


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What a check on ranks gets."""

    platform: Platform
    adapter: Adapter
    rank: int
    size: int
    place: Path
    """A folder that all ranks share."""

    def fresh_path(self, name: str) -> Path:
        """A path in the shared folder; every rank gets the same one for the same name."""
        return self.place / f"shared-{name}"


def main(place: Path, limit_s: float) -> int:
    """Fork the ranks of the job, wait for them, and return how many failed.

    The framework is imported once, before the fork, and used only after it: importing is most of a small job's cost.
    """
    job = json.loads((place / "job.json").read_text())
    adapter = adapter_named(job["platform"])
    for check in job["checks"]:
        importlib.import_module(check.split(":")[0])
    launcher = os.getpid()
    children = []
    for rank in range(job["size"]):
        child = os.fork()
        if child == 0:
            _be_rank(rank, job, adapter, place, limit_s, launcher)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _be_rank(rank: int, job: dict[str, Any], adapter: Adapter, place: Path, limit_s: float, launcher: int) -> NoReturn:
    """Run the checks as one rank, and end the process whatever happens."""
    output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(limit_s, exit=True)
    _end_with(launcher)
    status = 1
    try:
        adapter.join(rank, job["size"], place / "meeting")
        faulthandler.dump_traceback_later(limit_s, exit=True)  # anew: a slow start is no part of the checks
        world = World(platform=adapter.platform, adapter=adapter, rank=rank, size=job["size"], place=place)
        status = 0 if _run_checks(world, job["checks"]) else 1
        if status == 0:
            adapter.leave()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not an orderly exit: the others may still be inside a collective that this rank has left.
        os._exit(status)


def _run_checks(world: World, checks: list[str]) -> bool:
    for index, check in enumerate(checks):
        _write(world.place / f"verdict-{index}-{world.rank}", _run(check, world))
        if not _all_passed(world.place, index, world.size):
            return False
    return True


def _run(check: str, world: World) -> str:
    module, name = check.split(":")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(importlib.import_module(module), name).check(world)
    except BaseException:
        return traceback.format_exc()
    return ""


def _write(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _all_passed(place: Path, index: int, size: int) -> bool:
    """Wait for every rank's verdict; a rank that hangs in a collective is waited for until that times out."""
    deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S + 10
    files = [place / f"verdict-{index}-{rank}" for rank in range(size)]
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return not any(file.read_text() for file in files)


def _end_with(parent: int) -> None:
    """End this process when its parent has gone, so that an interrupted session leaves nobody behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
