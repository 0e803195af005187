"""A device's clock and its memory, read the same way on an accelerator and on the simulated one.

Bytes are *active* bytes: a block that a copy stream still owns counts, as it does on the device.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hyper_parallel.backends.planning.meters import Mark, Meter, SimulatedMeter
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError
from hyper_parallel.simulation.backend import SimulatedBackend

__all__ = ["AcceleratorMeter", "Meter", "SimulatedMeter", "has_device_memory", "meter_for"]

_SLEEP_CYCLES: Final = 2_000_000  # about a millisecond
_LONGEST_HOLD_S: Final = 0.5


class AcceleratorMeter:
    """An accelerator, through torch's module for it."""

    is_simulated = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)  # torch.cuda | torch.npu | torch.xpu
        self.device_name = str(self._module.get_device_name(device))
        self._cycles_per_second: float | None = None

    def _statistic(self, name: str) -> int:
        return int(self._module.memory_stats(self._device).get(name, 0))

    def active_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._statistic("active_bytes.all.current")

    def peak_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._statistic("active_bytes.all.peak")

    def reserved_bytes(self) -> int:
        """See :class:`Meter`."""
        return self._statistic("reserved_bytes.all.peak")

    def retries(self) -> int:
        """See :class:`Meter`."""
        return self._statistic("num_alloc_retries")

    def reset_peak(self) -> None:
        """See :class:`Meter`."""
        self._module.reset_peak_memory_stats(self._device)

    def capacity_bytes(self) -> int | None:
        """See :class:`Meter`."""
        free, total = self._module.mem_get_info(self._device)
        available = int(free) + self._statistic("reserved_bytes.all.current")
        fraction = getattr(self._module, "get_per_process_memory_fraction", None)  # not in every device's module
        return available if fraction is None else min(available, int(total * fraction(self._device)))

    def total_bytes(self) -> int | None:
        """See :class:`Meter`."""
        return int(self._module.mem_get_info(self._device)[1])

    def mark(self) -> Mark:
        """See :class:`Meter`."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """See :class:`Meter`."""
        return max(0.0, float(start.elapsed_time(end)) / 1e3)

    def wait(self) -> None:
        """See :class:`Meter`."""
        self._module.synchronize(self._device)

    def hold(self, seconds: float) -> None:
        """See :class:`Meter`. A device whose module cannot sleep is not held."""
        sleep = getattr(self._module, "_sleep", None)
        if sleep is None or seconds <= 0:
            return
        if self._cycles_per_second is None:
            start = self.mark()
            sleep(_SLEEP_CYCLES)
            end = self.mark()
            self.wait()
            self._cycles_per_second = _SLEEP_CYCLES / max(self.seconds(start, end), 1e-6)
        sleep(int(min(seconds, _LONGEST_HOLD_S) * self._cycles_per_second))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See :class:`Meter`."""
        return isinstance(error, torch.OutOfMemoryError)

    def release_cached(self) -> None:
        """See :class:`Meter`."""
        self._module.empty_cache()


def has_device_memory() -> bool:
    """Whether there is a device whose memory a plan could keep to a budget: an accelerator, or the simulated one."""
    is_simulated = any(isinstance(backend, SimulatedBackend) for backend in SwapManager().backends.values())
    return is_simulated or torch.accelerator.is_available()


def meter_for(device: torch.device, *, who: str) -> Meter:
    """The meter of the device that a model is on."""
    simulated = SwapManager().backends.get(("torch simulated", device.type))
    if isinstance(simulated, SimulatedBackend):
        return SimulatedMeter(simulated.simulation)
    if device.type in ("cpu", "meta"):
        raise PlanError(
            f"{who}: the model is on {device.type}, where activations are in host memory already and there is no device memory "
            "to plan. Move it to an accelerator, or run inside hyper_parallel.testing.simulated_accelerator()."
        )
    return AcceleratorMeter(device)
