"""What the simulated device remembers of host bytes, and for how long; no framework is needed for it."""

from __future__ import annotations

import pytest

from hyper_parallel.simulation.backend import ByteRange, SimulatedBackend
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulationError


class _Bytes(bytearray):
    """Bytes that can be held weakly."""


class _Memory:
    """As much of a framework's memory as host buffers need; every buffer lies at the same place, as freed ones come to."""

    framework = "none"
    object_outlives_bytes = False
    unseen = host_view = None

    def new_host_bytes(self, nbytes: int) -> tuple[_Bytes, object]:
        flat = _Bytes(nbytes)
        return flat, flat

    def range_of(self, flat: _Bytes) -> ByteRange:
        return ByteRange(1, 0, len(flat))


@pytest.fixture
def backend() -> SimulatedBackend:
    return SimulatedBackend(_Memory(), Simulation("lazy", 0))  # type: ignore[arg-type]


def written(backend: SimulatedBackend) -> _Bytes:
    """Host bytes into which a copy goes that nothing waits for."""
    flat: _Bytes = backend.allocate_host(8, pinned=True)
    backend._claim(backend.new_stream(), ByteRange(1, 0, 8), is_write=True, what="copy out")
    return flat


def test_host_bytes_that_a_copy_fills_may_not_be_read(backend: SimulatedBackend) -> None:
    flat = written(backend)
    with pytest.raises(SimulationError, match="reads bytes that copy out"):
        backend.check_read(1, len(flat), what="an op")


def test_the_copies_of_dead_host_bytes_are_nothing_to_what_comes_to_lie_there(backend: SimulatedBackend) -> None:
    # A value handed out behind every mode had taken the place of a host buffer, and its first read was blamed.
    flat = written(backend)
    del flat
    backend.check_read(1, 8, what="an op")


def test_a_dead_buffer_takes_nothing_from_the_one_that_lies_there_now(backend: SimulatedBackend) -> None:
    dead = written(backend)
    flat = written(backend)
    del dead
    with pytest.raises(SimulationError, match="reads bytes that copy out"):
        backend.check_read(1, len(flat), what="an op")
