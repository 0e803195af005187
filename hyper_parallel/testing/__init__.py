"""The simulated accelerator, and assertions that users may reuse in their own tests.

``simulated_accelerator`` makes CPU tensors count as device memory of an accelerator whose copy streams are asynchronous,
so that swapping can be tested, bitwise and deterministically, on a machine without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hyper_parallel.config import SwapConfig, configure
from hyper_parallel.testing.streams import SimulationError

if TYPE_CHECKING:
    from hyper_parallel.testing.simulation import Simulation

__all__ = ["SimulationError", "simulated_accelerator"]


@contextlib.contextmanager
def simulated_accelerator(
    timing: str = "lazy",
    seed: int = 0,
    min_bytes: int = 0,
    tail_bytes: int = 0,
    window_bytes: int = 65536,
    **settings: Any,
) -> Iterator[Simulation]:
    """CPU tensors are device memory inside; copies happen when the timing says so.

    Args:
        timing: ``lazy`` (a copy happens only when something waits for it), ``random`` (by seed) or ``eager``.
        seed: of the random timing.
        min_bytes: as in :class:`SwapConfig`; small here, so that small tests really swap.
        tail_bytes: as above.
        window_bytes: as above; also how far loads run ahead, unless ``prefetch_bytes`` is given.
        **settings: any other field of :class:`SwapConfig`.

    Yields:
        A simulation with ``live_bytes``, ``peak_bytes``, ``swapped_bytes``, ``reset_peak()`` and ``violations``.

    Raises:
        SimulationError: at the op, or at the end, when bytes were used at a moment when a device may not have them.
    """
    from hyper_parallel.core.activation_checkpoint.border import room

    settings.setdefault("prefetch_bytes", window_bytes)
    config = SwapConfig(min_bytes=min_bytes, tail_bytes=tail_bytes, window_bytes=window_bytes, **settings)
    with configure(config), room().simulate(timing, seed) as simulation:
        yield simulation
