"""The accelerators that torch sees, each with its links measured."""

from __future__ import annotations

import dataclasses

import torch

from hyper_parallel.backends.machine import Accelerator
from hyper_parallel.backends.torch.devices import backend_for
from hyper_parallel.backends.torch.machine_ranks import rates_of_all_devices
from hyper_parallel.backends.torch.planner.links import measure_link
from hyper_parallel.backends.torch.planner.meters import meter_for
from hyper_parallel.config import current_config

__all__ = ["accelerators"]


def accelerators() -> tuple[Accelerator, ...]:
    """Every CUDA device, each with its links measured, alone and while all of them copy."""
    found = [_measured(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if len(found) < 2:
        return tuple(found)
    return tuple(
        dataclasses.replace(one, shared_out_bytes_per_second=out, shared_in_bytes_per_second=back)
        for one, (out, back) in zip(found, rates_of_all_devices(len(found)))
    )


def _measured(index: int) -> Accelerator:
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        free, total = torch.cuda.mem_get_info(device)
        backend = backend_for(device, current_config())
        assert backend is not None, "an accelerator has a backend"
        link = measure_link(backend, meter_for(device, who="doctor"), ())
    return Accelerator(
        name=torch.cuda.get_device_name(device),
        memory_bytes=total,
        free_bytes=free,
        out_bytes_per_second=link.out_bytes_per_second,
        in_bytes_per_second=link.in_bytes_per_second,
        copy_seconds=link.copy_seconds,
        pin_seconds_per_byte=link.pin_seconds_per_byte,
    )
