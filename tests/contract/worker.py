"""One rank of a ranked job: ``python -m <package>.worker PLACE LIMIT_S RANK``."""

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


def main(place: Path, limit_s: float, rank: int) -> None:
    faulthandler.dump_traceback_later(limit_s, exit=True)
    _end_with(os.getppid())
    job = json.loads((place / "job.json").read_text())
    adapter = adapter_named(job["platform"])
    adapter.join(rank, job["size"], place / "meeting")
    world = World(platform=adapter.platform, adapter=adapter, rank=rank, size=job["size"], place=place)
    for index, check in enumerate(job["checks"]):
        _write(place / f"verdict-{index}-{rank}", _run(check, world))
        if not _all_passed(place, index, job["size"]):
            # The others may still be inside a collective that I have left: there is no orderly way out of this world.
            sys.stdout.flush()
            os._exit(1)
    adapter.leave()


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
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
