"""Observing a step as it runs: memory, work, copies and waits over time. The result is a record; ``report`` draws it."""

from hyper_parallel.backends.torch.step_observation.gradient_fingerprint import FirstGradients, add_gradients
from hyper_parallel.backends.torch.step_observation.step_observer import StepObserver, find_observed_blocks, versions_of
from hyper_parallel.backends.torch.step_observation.ways import WAYS, Way, in_one_way

__all__ = [
    "WAYS",
    "FirstGradients",
    "StepObserver",
    "Way",
    "add_gradients",
    "find_observed_blocks",
    "in_one_way",
    "versions_of",
]
