"""A step written down as it ran: memory, work, copies and waits over time. Records in ``planner.run``, drawn by ``report``."""

from hyper_parallel.backends.torch.recording.gradients import FirstGradients, add_gradients
from hyper_parallel.backends.torch.recording.recorder import Recorder, find_recorded_blocks, versions_of
from hyper_parallel.backends.torch.recording.ways import WAYS, Way, in_one_way

__all__ = [
    "WAYS",
    "FirstGradients",
    "Recorder",
    "Way",
    "add_gradients",
    "find_recorded_blocks",
    "in_one_way",
    "versions_of",
]
