"""The context in which CPU tensors are device memory of a simulated accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hyper_parallel.config import SwapConfig, configure, parse_bytes

if TYPE_CHECKING:
    from hyper_parallel.simulation.simulation import Simulation
    from hyper_parallel.simulation.speed import DeviceSpeed

__all__ = ["simulated_accelerator"]


@contextlib.contextmanager
def simulated_accelerator(
    timing: str = "lazy",
    seed: int = 0,
    min_bytes: int = 0,
    tail_bytes: int | None = 0,
    window_bytes: int | None = 65536,
    capacity_bytes: int | str | None = None,
    speed: DeviceSpeed | None = None,
    **settings: Any,
) -> Iterator[Simulation]:
    """CPU tensors are device memory inside; copies happen when the timing says so.

    Args:
        timing: ``lazy`` (a copy happens only when something waits for it), ``random`` (by seed) or ``eager``.
        seed: of the random timing.
        min_bytes: as in :class:`SwapConfig`; small here, so that small tests really swap.
        tail_bytes: as above.
        window_bytes: as above; also how far loads run ahead, unless ``prefetch_bytes`` is given.
        capacity_bytes: how much memory the device has, such as ``"2MiB"``: an op whose output does not fit raises
            ``MemoryError``, and a budget of ``"90%"`` or ``"auto"`` is a share of it. None: there is no end to it.
        speed: how fast the device is. With it, time on the device is arithmetic and the same on every machine; without it,
            the device's time is the host's.
        **settings: any other field of :class:`SwapConfig`.

    Yields:
        A simulation with ``live_bytes``, ``peak_bytes``, ``swapped_bytes``, ``reset_peak()`` and ``violations``.

    Raises:
        SimulationError: at the op, or at the end, when bytes were used at a moment when a device may not have them.
    """
    from hyper_parallel.core.activation_checkpoint.adapter import current_backend

    capacity = None if capacity_bytes is None else parse_bytes(capacity_bytes, name="capacity_bytes")
    settings.setdefault("prefetch_bytes", window_bytes)
    config = SwapConfig(min_bytes=min_bytes, tail_bytes=tail_bytes, window_bytes=window_bytes, **settings)
    with configure(config), current_backend().simulate(timing, seed) as simulation:
        simulation.capacity_bytes = capacity
        simulation.timeline.speed = speed
        yield simulation
