"""One rank of a launch: ``python -m <package>.worker MODULE CHECKS FOLDER RANK``."""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from hyper_parallel import SwapManager

from .launch import COLLECTIVE_LIMIT_S, LAUNCH_LIMIT_S, PASSED, WORLD_SIZE, World


def main(module: str, names: list[str], place: Path, rank: int) -> None:
    faulthandler.dump_traceback_later(LAUNCH_LIMIT_S - 5, exit=True)
    _end_with(os.getppid())
    torch.set_num_threads(1)
    store = dist.FileStore(str(place / "meeting"), WORLD_SIZE)
    limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    checks = importlib.import_module(f"{__package__}.{module}")
    for name in names:
        started = time.monotonic()
        verdict = _run(getattr(checks, name), World(rank=rank, size=WORLD_SIZE, place=place))
        (place / f"{name}-{rank}").write_text(verdict)
        print(
            f"{name}: {'passed' if verdict == PASSED else 'failed'} in {time.monotonic() - started:.2f} s", flush=True
        )
        if verdict != PASSED:
            # The other rank may be inside a collective that this one has left: there is no orderly way out.
            sys.stderr.flush()
            os._exit(1)
        dist.barrier()
    dist.destroy_process_group()


def _run(check: object, world: World) -> str:
    assert callable(check)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of torch's own making: DTensor and gloo speak of their own future.
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            SwapManager().reset()
            check(world)
    except BaseException:
        return traceback.format_exc()
    return PASSED


def _end_with(parent: int) -> None:
    """End this process when its parent has gone, so that an interrupted session leaves nobody behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3]), int(sys.argv[4]))
