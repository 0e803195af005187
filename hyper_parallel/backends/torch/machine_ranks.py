"""What each rank of this host gets of its link while all of them copy, measured for ``doctor``.

Where a launcher started the command on several ranks, they measure together. One process that sees several devices copies on
all of them at once instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import torch

from hyper_parallel.backends.planning.links import HostProbe
from hyper_parallel.backends.torch.devices import backend_for
from hyper_parallel.backends.torch.planner.links import LinkProbe, rates_of_devices
from hyper_parallel.backends.torch.planner.meters import meter_for
from hyper_parallel.backends.torch.planner.world import world
from hyper_parallel.config import current_config
from hyper_parallel.planner.shared_link import Rates, measured_together

__all__ = ["launched_rank", "rates_of_all_devices", "rates_of_launched_ranks"]

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> int | None:
    """This process's rank, where a launcher such as torchrun started several; None where it did not."""
    if any(name not in os.environ for name in _VARIABLES) or not torch.distributed.is_available():
        return None
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return int(rank) if rank.isdecimal() and size.isdecimal() and int(size) > 1 else None


def rates_of_launched_ranks() -> Rates | None:
    """Of this rank's device, or from RAM to RAM where there is none; all ranks call it. None where each has its own host."""
    with _group():
        ranks = world()
        assert ranks is not None, "a launcher started several ranks"
        probe = _probe(int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else HostProbe()
        return measured_together(ranks, probe)


def rates_of_all_devices(count: int) -> tuple[tuple[float, float], ...]:
    """Bytes per second out and back of each device while all copy."""
    probes = [_probe(index) for index in range(count)]
    out, back = (rates_of_devices(probes, goes_out=goes_out) for goes_out in (True, False))
    return tuple(zip(out, back))


@contextlib.contextmanager
def _group() -> Iterator[None]:
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _probe(index: int) -> LinkProbe:
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        backend = backend_for(device, current_config())
        assert backend is not None, "an accelerator has a backend"
        return LinkProbe(backend, meter_for(device, who="doctor"))
