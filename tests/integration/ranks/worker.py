"""One rank: ``python -m <package>.worker CHECK FOLDER RANK SIZE``; writes what it found into the folder."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.planning.world import RankedWorld
from hyper_parallel.backends.torch.planner.world import world
from hyper_parallel.core.activation_checkpoint.far import process_memory
from hyper_parallel.errors import LostRankError
from hyper_parallel.integrations.lost_ranks import name_lost_ranks
from hyper_parallel.planner.shared_link import measured_together
from hyper_parallel.testing import simulated_accelerator

from .launch import LIMIT_S

MIB = 2**20
MACHINE_BYTES = 64 * MIB
LINK_BYTES_PER_SECOND = 1000.0
WIDTH, ROWS = 32, 64


class Rank:
    """What a check gets."""

    def __init__(self, place: Path, rank: int, size: int) -> None:
        self.place = place
        self.rank = rank
        self.size = size

    def join(self, store: Any = None) -> None:
        """Make the default group."""
        store = store or dist.FileStore(str(self.place / "meeting"), self.size)
        limit = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=limit)

    def say(self, what: Any) -> None:
        """Write down what the test reads."""
        (self.place / f"said-{self.rank}").write_text(json.dumps(what))

    def wait_for(self, name: str) -> None:
        """Until there is a file of this name."""
        while not (self.place / name).exists():
            time.sleep(0.02)

    def is_last(self) -> bool:
        """Whether this is the rank that is lost."""
        return self.rank == self.size - 1


def die() -> NoReturn:
    """As the kernel ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process does not live on after SIGKILL")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


# ---------------------------------------------------------------------- host memory


def swap_until_refused(**settings: int) -> dict[str, int]:
    """More than the machine has, in values of one MiB."""
    with simulated_accelerator(min_bytes=MIB, tail_bytes=0, window_bytes=MIB, **settings):
        module = hp.swap_wrapper(Squares())
        module(torch.ones(MIB // 4, requires_grad=True)).sum().backward()
        stats = hp.stats()
        (tier,) = stats.tiers
        return {
            "held": tier.peak_held_bytes,
            "limit": tier.limit_bytes or 0,
            "refusals": tier.refusals,
            "out": stats.swapped_out_bytes,
        }


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(MACHINE_BYTES // MIB):
            x = x.sin()
        return x


def on_a_small_machine() -> None:
    process_memory._machine_bytes = lambda root: MACHINE_BYTES  # type: ignore[assignment]
    process_memory._group_bytes = lambda root: iter((MACHINE_BYTES,))  # type: ignore[assignment]


def check_shared_host(rank: Rank) -> None:
    store = dist.FileStore(str(rank.place / "meeting"), rank.size)
    rank.join(store)
    link = rates_of_modelled_link(rank, store)
    on_a_small_machine()
    explicit = swap_until_refused(host_limit=3 * MIB)
    hp.SwapManager().reset()
    found = swap_until_refused()
    rows: list[Any] = [None] * rank.size
    dist.all_gather_object(rows, None)  # nobody has gone while others still pin
    rank.say({"shared": found, "explicit": explicit, "link": link})


def check_pinned_memory_without_a_group(rank: Rank) -> None:
    on_a_small_machine()
    rank.say({"shared": swap_until_refused()})


# ---------------------------------------------------------------------- the link


class ModelledLink:
    """A link that its ranks share equally, modelled in the store of the group.

    A copy takes as long as there are copies beside it. Between two gathers every rank copies or waits; once all have said
    which, the number of copies is known. So the answer does not depend on time.
    """

    def __init__(self, ranks: RankedWorld, store: Any, size: int) -> None:
        self.rank = ranks.rank
        self._ranks = ranks
        self._store = store
        self._size = size
        self._epoch = 0  # gathers so far
        self._has_said = False

    def gather(self, value: Any) -> list[Any]:
        """Of the world: this rank does not copy (any more) in this epoch."""
        self._say("waiting")
        rows = self._ranks.gather(value)
        self._epoch, self._has_said = self._epoch + 1, False
        return rows

    def bytes_per_second(self, *, goes_out: bool, is_shared: bool) -> float:
        """Of the probe."""
        self._say("copying")
        while self._count("copying") + self._count("waiting") < self._size:
            time.sleep(0.01)
        return LINK_BYTES_PER_SECOND / self._count("copying")

    def _say(self, what: str) -> None:
        if not self._has_said:
            self._has_said = True
            self._store.set(f"link/{self._epoch}/{what}/{self.rank}", "1")

    def _count(self, what: str) -> int:
        return sum(self._store.check([f"link/{self._epoch}/{what}/{rank}"]) for rank in range(self._size))


def rates_of_modelled_link(rank: Rank, store: Any) -> list[float]:
    ranks = world()
    assert ranks is not None
    link = ModelledLink(ranks, store, rank.size)
    rates = measured_together(link, link)
    assert rates is not None
    return [rates.ranks, rates.lone_out, rates.lone_in, rates.shared_out, rates.shared_in]


# ---------------------------------------------------------------------- ranks that are lost


def fit_until_lost(rank: Rank, model: nn.Module, dies_at: int) -> None:
    """A fit whose last rank ends in the middle of its step number ``dies_at``."""
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        loss = model(torch.ones(ROWS, WIDTH)).square().mean()
        if rank.is_last() and calls == dies_at:
            die()
        loss.backward()

    with simulated_accelerator():
        try:
            hp.fit_memory(model, step, "200KiB", steps=1)
        except LostRankError as error:
            rank.say({"ranks": error.ranks, "text": str(error), "cause": repr(error.__cause__)})


def check_lost_while_planning(rank: Rank) -> None:
    rank.join()
    fit_until_lost(rank, Stack(), dies_at=4)


def check_lost_in_a_step_of_a_plan(rank: Rank) -> None:
    rank.join()
    fit_until_lost(rank, nn.parallel.DistributedDataParallel(Stack()), dies_at=4)


def check_lost_with_the_store(rank: Rank) -> None:
    """The last rank keeps the store of the group."""
    port = rank.place / "port"
    if rank.is_last():
        store = dist.TCPStore("127.0.0.1", 0, rank.size, is_master=True, wait_for_workers=False)
        (rank.place / "port.new").write_text(str(store.port))
        (rank.place / "port.new").rename(port)
    else:
        rank.wait_for("port")
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), rank.size, is_master=False)
    rank.join(store)
    fit_until_lost(rank, Stack(), dies_at=4)


def check_late(rank: Rank) -> None:
    rank.join()
    ranks = world()
    assert ranks is not None
    ranks.gather(None)
    if rank.is_last():
        rank.wait_for("said-0")
        return
    with hp.configure(rank_timeout_seconds=1):
        try:
            ranks.gather(None)
        except LostRankError as error:
            rank.say({"ranks": error.ranks, "text": str(error)})


def check_lost_in_training(rank: Rank) -> None:
    """With values on disk: the folder must be empty afterwards."""
    rank.join()
    folder = rank.place / "disk"
    folder.mkdir(exist_ok=True)
    model = Stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = hp.swap_wrapper(block)
    parallel = nn.parallel.DistributedDataParallel(model)
    hp.configure(tiers="disk", disk_path=folder, disk_limit="64MiB", min_bytes=1, tail_bytes=0, window_bytes=1)
    try:
        for number in range(3):
            with name_lost_ranks():
                loss = parallel(torch.ones(ROWS, WIDTH)).square().mean()
                if number == 1:
                    assert hp.stats().swapped_out_bytes > 0
                    (rank.place / f"shared-{rank.rank}").write_text("\n".join(shared_files()))
                if rank.is_last() and number == 1:
                    die()
                loss.backward()
    except LostRankError as error:
        rank.say({"ranks": error.ranks, "text": str(error), "cause": repr(error.__cause__)})


def shared_files() -> list[str]:
    """What this process has open or mapped in the host's shared memory."""
    names = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for entry in Path("/proc/self/fd").iterdir():
        if entry.is_symlink():
            names.add(os.readlink(entry))
    return sorted(name for name in names if name.startswith("/dev/shm/") and not name.endswith("(deleted)"))


def main(checks: Mapping[str, Any], check: str, place: str, rank: str, size: str) -> None:
    """Run one check of a module."""
    faulthandler.dump_traceback_later(LIMIT_S - 5, exit=True)
    torch.set_num_threads(1)
    checks[f"check_{check}"](Rank(Path(place), int(rank), int(size)))
    # The group of a lost rank cannot be taken down in order.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(globals(), *sys.argv[1:])
