"""The simulated accelerator for users' own tests.

``simulated_accelerator`` makes CPU tensors count as device memory of an accelerator whose copy streams are asynchronous,
so that swapping can be tested, bitwise and deterministically, on a machine without one.
"""

from hyper_parallel.simulation.accelerator import simulated_accelerator
from hyper_parallel.simulation.speed import DeviceSpeed
from hyper_parallel.simulation.streams import SimulationError

__all__ = ["DeviceSpeed", "SimulationError", "simulated_accelerator"]
