"""The clock and the memory of a MindSpore device, the ranks of a run, and what the device can give.

The Ascend meter is written against MindSpore's documentation; no Ascend has run it yet.
"""

from __future__ import annotations

from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.planner.blocks import device_of, require_cell
from hyper_parallel.backends.planning.meters import Mark, Meter, SimulatedMeter
from hyper_parallel.backends.planning.world import RankedWorld
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.budget import DeviceMemory
from hyper_parallel.platform.mindspore.device import CPU
from hyper_parallel.platform.platform import get_platform
from hyper_parallel.simulation.backend import SimulatedBackend

__all__ = ["AscendMeter", "device_memory", "memory_of", "meter_for", "world"]


class AscendMeter:
    """An Ascend, through ``mindspore.runtime``."""

    is_simulated = False

    def __init__(self) -> None:
        self.device_name = "Ascend"

    def active_bytes(self) -> int:
        """See :class:`Meter`."""
        return int(mindspore.runtime.memory_allocated())

    def peak_bytes(self) -> int:
        """See :class:`Meter`."""
        return int(mindspore.runtime.max_memory_allocated())

    def reserved_bytes(self) -> int:
        """See :class:`Meter`."""
        return int(mindspore.runtime.max_memory_reserved())

    def retries(self) -> int:
        """See :class:`Meter`. MindSpore does not count them."""
        return 0

    def reset_peak(self) -> None:
        """See :class:`Meter`."""
        mindspore.runtime.reset_peak_memory_stats()

    def capacity_bytes(self) -> int | None:
        """See :class:`Meter`. MindSpore does not say what is free."""
        return None

    def total_bytes(self) -> int | None:
        """See :class:`Meter`."""
        return None

    def mark(self) -> Mark:
        """See :class:`Meter`."""
        event = mindspore.runtime.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """See :class:`Meter`."""
        return max(0.0, float(start.elapsed_time(end)) / 1e3)

    def wait(self) -> None:
        """See :class:`Meter`."""
        mindspore.runtime.synchronize()

    def hold(self, seconds: float) -> None:
        """See :class:`Meter`. MindSpore has no op that sleeps."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """See :class:`Meter`. MindSpore has no class for a full device."""
        return isinstance(error, RuntimeError) and "memory" in str(error).lower()

    def release_cached(self) -> None:
        """See :class:`Meter`."""
        mindspore.runtime.empty_cache()


def meter_for(device: str, *, who: str) -> Meter:
    """The meter of the device that a model runs on."""
    simulated = SwapManager().backends.get(("mindspore simulated", device))
    if isinstance(simulated, SimulatedBackend):
        return SimulatedMeter(simulated.simulation)
    if device == CPU:
        raise PlanError(
            f"{who}: the model is on {device}, where activations are in host memory already and there is no device memory to "
            "plan. Run on Ascend, or inside hyper_parallel.testing.simulated_accelerator()."
        )
    return AscendMeter()


def device_memory(model: Any, *, who: str) -> DeviceMemory:
    """What the device of this model can give to this process; an error for a model on the CPU."""
    require_cell(model, who)
    return memory_of(model, meter_for(device_of(model, who), who=who))


def memory_of(model: Any, meter: Meter) -> DeviceMemory:
    """The same, where the meter is known. An optimizer of MindSpore makes its states when it is made: none are expected.

    The simulated device counts no bytes that no op made, so that states would not count there.
    """
    return DeviceMemory(device=meter.device_name, available_bytes=meter.capacity_bytes(), expected_state_bytes=0)


def world() -> RankedWorld | None:
    """The ranks that must agree; None for one process."""
    platform = get_platform()
    size = int(platform.get_world_size()) if _is_initialised() else 1
    return RankedWorld(int(platform.get_rank()), size) if size > 1 else None


def _is_initialised() -> bool:
    from hyper_parallel.platform.mindspore import compat

    return bool(compat.GlobalComm.INITED)
