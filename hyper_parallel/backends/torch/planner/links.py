"""The way to far memory as it was in the step: both directions, the cost of one copy and of pinning."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

import torch

from hyper_parallel.backends.planning.links import rate_of
from hyper_parallel.backends.planning.meters import Meter, SimulatedMeter
from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.planner.profile import Link

__all__ = ["measure_link"]

_PROBE_BYTES: Final = 64 * 2**20
_SMALL_PROBE_BYTES: Final = 2**20
_PROBES: Final = 5


def measure_link(backend: DeviceBackend, meter: Meter, spans: Sequence[LinkSpan]) -> Link:
    """From the copies of a step where it made any that are large enough, else from copies of our own."""
    if isinstance(meter, SimulatedMeter) and meter.speed is not None:
        rate = meter.speed.link_bytes_per_second
        return Link(out_bytes_per_second=rate, in_bytes_per_second=rate, copy_seconds=meter.speed.copy_seconds)
    if meter.is_simulated:
        rate = _host_rate()
        return Link(out_bytes_per_second=rate, in_bytes_per_second=rate)
    out, back = rate_of(spans, "copy out"), rate_of(spans, "copy back")
    started = time.perf_counter()
    host = backend.allocate_host(_PROBE_BYTES, pinned=True)
    pin_seconds = time.perf_counter() - started
    device = backend.allocate(_PROBE_BYTES)
    large = [_copy_seconds(backend, meter, device, host, _PROBE_BYTES, goes_out=goes_out) for goes_out in (True, False)]
    small = _copy_seconds(backend, meter, device, host, _SMALL_PROBE_BYTES, goes_out=True)
    out = out or _PROBE_BYTES / large[0]
    back = back or _PROBE_BYTES / large[1]
    return Link(
        out_bytes_per_second=out,
        in_bytes_per_second=back,
        copy_seconds=max(0.0, small - _SMALL_PROBE_BYTES / (_PROBE_BYTES / large[0])),
        pin_seconds_per_byte=pin_seconds / _PROBE_BYTES,
    )


def _copy_seconds(
    backend: DeviceBackend, meter: Meter, device: torch.Tensor, host: torch.Tensor, nbytes: int, *, goes_out: bool
) -> float:
    stream = backend.new_stream()
    times = []
    with unseen():
        device, host = device[:nbytes], host[:nbytes]
    for _ in range(_PROBES):
        meter.wait()
        start = backend.record_event(stream, timing=True)
        backend.copy(*((host, device) if goes_out else (device, host)), stream)
        end = backend.record_event(stream, timing=True)
        backend.synchronize_event(end)
        times.append(backend.elapsed_us(start, end) / 1e6)
    return max(statistics.median(times), 1e-9)


def _host_rate() -> float:
    """Simulated time has no length: what a copy costs there is a copy on the host."""
    with unseen():
        source = torch.ones(4 * 2**20, dtype=torch.uint8)
        target = torch.zeros_like(source)
        times = []
        for _ in range(_PROBES):
            started = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - started)
    return float(source.numel() / max(statistics.median(times), 1e-9))
