"""The way to far memory as it was in the step: both directions, the cost of one copy and of pinning."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from hyper_parallel.backends.planning.links import rate_of
from hyper_parallel.backends.planning.meters import Meter, SimulatedMeter
from hyper_parallel.backends.torch.devices import backend_for
from hyper_parallel.backends.torch.planner.blocks import device_of, require_module
from hyper_parallel.backends.torch.planner.meters import meter_for
from hyper_parallel.backends.torch.storages import unseen
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Event
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.planner.profile import Link

__all__ = ["LinkProbe", "link_probe", "measure_link", "rates_of_devices"]

_PROBE_BYTES: Final = 64 * 2**20
_SMALL_PROBE_BYTES: Final = 2**20
_PROBES: Final = 5
_SHARED_PROBES: Final = 40  # ranks do not begin at the very same moment: all copy long enough to overlap


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


class LinkProbe:
    """Copies of our own; see ``planner.shared_link``."""

    def __init__(self, backend: DeviceBackend, meter: Meter) -> None:
        self._backend = backend
        self._meter = meter
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None  # device, host

    def bytes_per_second(self, *, goes_out: bool, is_shared: bool) -> float:
        """The rate in one direction."""
        if self._meter.is_simulated:
            return _host_rate()
        seconds = _copy_seconds(
            self._backend,
            self._meter,
            *self._device_and_host(),
            _PROBE_BYTES,
            goes_out=goes_out,
            probes=_SHARED_PROBES if is_shared else _PROBES,
        )
        return _PROBE_BYTES / seconds

    def begin(self, *, goes_out: bool) -> tuple[Event, Event]:
        """Queue many copies, and do not wait for them."""
        backend, (device, host) = self._backend, self._device_and_host()
        stream = backend.new_stream()
        start = backend.record_event(stream, timing=True)
        for _ in range(_SHARED_PROBES):
            backend.copy(*((host, device) if goes_out else (device, host)), stream)
        return start, backend.record_event(stream, timing=True)

    def rate_of(self, copies: tuple[Event, Event]) -> float:
        """Bytes per second of what :meth:`begin` queued."""
        self._backend.synchronize_event(copies[1])
        return _SHARED_PROBES * _PROBE_BYTES / max(self._backend.elapsed_us(*copies) / 1e6, 1e-9)

    def _device_and_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            self._buffers = (
                self._backend.allocate(_PROBE_BYTES),
                self._backend.allocate_host(_PROBE_BYTES, pinned=True),
            )
        return self._buffers


def rates_of_devices(probes: Sequence[LinkProbe], *, goes_out: bool) -> list[float]:
    """Bytes per second of each device while all of them copy."""
    copies = [probe.begin(goes_out=goes_out) for probe in probes]
    return [probe.rate_of(events) for probe, events in zip(probes, copies)]


def link_probe(model: Any, *, who: str) -> LinkProbe:
    """See ``planner.backend``."""
    device = device_of(require_module(model, who), who)
    backend = backend_for(device, current_config())
    assert backend is not None, "a device that has a meter has a backend"
    return LinkProbe(backend, meter_for(device, who=who))


def _copy_seconds(
    backend: DeviceBackend,
    meter: Meter,
    device: torch.Tensor,
    host: torch.Tensor,
    nbytes: int,
    *,
    goes_out: bool,
    probes: int = _PROBES,
) -> float:
    stream = backend.new_stream()
    times = []
    with unseen():
        device, host = device[:nbytes], host[:nbytes]
    for _ in range(probes):
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
