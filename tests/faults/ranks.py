"""A rank that dies in a collective: the other one is told within the limit, and goes on alone.

``python -m faults.ranks FOLDER RANK WHERE`` is one rank: it trains with swapped blocks and a collective between them, and
rank 1 ends without a word in the forward, the replay or the backward of its second step.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

COLLECTIVE_LIMIT_S: Final = 120
RANK_LIMIT_S: Final = 600
"""Both end a hang. No verdict depends on them: a partner that dies closes its connections, and that is told at once."""
MOMENTS: Final = ("backward", "replay")  # before a collective of each
TOLD: Final = "error within the limit, next step right"


def partner_dies(folder: Path) -> Iterator[str]:
    """What became of the rank that was left, for each moment at which the other one ended."""
    for moment in MOMENTS:
        yield _run(folder, moment)
        for file in folder.iterdir():
            file.unlink()


def _run(folder: Path, moment: str) -> str:
    tests = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
        "HYPER_PARALLEL_PLATFORM": "torch",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "faults.ranks", str(folder), str(rank), moment],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        texts = [rank.communicate(timeout=RANK_LIMIT_S + 10)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 9], f"{moment}: exit codes {codes}\n{texts[0]}\n{texts[1]}"
    return texts[0].strip().splitlines()[-1]


# ------------------------------------------------------------------ one rank


def main(folder: Path, rank: int, moment: str) -> None:
    """See the module."""
    faulthandler.dump_traceback_later(RANK_LIMIT_S, exit=True)
    import torch
    import torch.distributed as dist

    import hyper_parallel as hp
    from faults.bench import PinnedStep

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), 2)
    limit = datetime.timedelta(seconds=COLLECTIVE_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    platform = hp.get_platform()
    dying: list[str] = []

    def meet(x: torch.Tensor) -> torch.Tensor:
        is_replay = torch._C._current_graph_task_id() != -1
        if dying == ["forward"] or (dying == ["replay"] and is_replay):
            os._exit(9)
        met: torch.Tensor = platform.differentiable_all_reduce(x, "sum", dist.group.WORLD)
        if dying == ["backward"]:
            met.register_hook(lambda grad: os._exit(9))  # before the backward's own collective
        return met

    step = PinnedStep(meet)
    first = step.run()
    if rank == 1:
        dying.append(moment)
        step.run()
        raise AssertionError("the planned end did not come")
    _go_on_alone(step, first, dist)


def _go_on_alone(step: Any, first: list[bytes], dist: Any) -> None:
    try:
        step.run()
    except RuntimeError as error:
        words = str(error)
    else:
        raise AssertionError("a collective with a dead partner came to an end")
    assert words, "an error without words"
    step.look_for_leaks()
    dist.destroy_process_group()
    step.meets_nobody()
    assert step.run() == step.expected_alone()
    step.look_for_leaks()
    assert first
    print(TOLD, flush=True)
    os._exit(0)  # the framework's own threads may still wait for the partner


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
