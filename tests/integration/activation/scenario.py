"""What a scenario is: a function of a kind that trains something small and returns every tensor worth comparing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .kinds import PLAIN, TORCH_CHECKPOINT, Kind
from .models import WIDTH

__all__ = ["MAY_REFUSE", "SCENARIOS", "Log", "assert_same", "batch", "oracle", "run", "scenario"]

Results = dict[str, torch.Tensor | None]
Scenario = Callable[[Kind, "Log"], None]

SCENARIOS: dict[str, Scenario] = {}
MAY_REFUSE: set[str] = set()
"""Scenarios with a change in place that a kind which files op outputs may refuse instead of being right."""


def scenario(function: Scenario) -> Scenario:
    """Enter a scenario in the table."""
    assert function.__name__ not in SCENARIOS, f"two scenarios are called {function.__name__}"
    SCENARIOS[function.__name__] = function
    return function


class Log:
    """Every tensor worth comparing, copied at the moment it was logged."""

    def __init__(self) -> None:
        self.results: Results = {}

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        key = f"{len(self.results)}:{name}"
        self.results[key] = None if tensor is None else tensor.detach().clone()

    def model(self, model: nn.Module) -> None:
        """Gradients, values and buffers, by position: the oracle's wrapper shows in names."""
        for parameter in model.parameters():
            self.keep("gradient", parameter.grad)
            self.keep("parameter", parameter)
        for buffer in model.buffers():
            self.keep("buffer", buffer)


def batch(rows: int = 4, width: int = WIDTH, *, seed: int = 1, grad: bool = True) -> torch.Tensor:
    """An input that does not move the global random state."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).requires_grad_(grad)


def run(name: str, kind: Kind) -> Results:
    """One scenario under one kind."""
    log = Log()
    torch.manual_seed(5)
    SCENARIOS[name](kind, log)
    return log.results


@functools.cache
def oracle(name: str, kind: Kind) -> Results:
    """What the step gives without the engine."""
    return run(name, kind)


def assert_same(name: str, kind: Kind, results: Results) -> None:
    """Bitwise equal to the oracle, in every tensor."""
    expected = oracle(name, PLAIN)
    replayed = oracle(name, TORCH_CHECKPOINT) if kind.recomputes else expected
    assert list(results) == list(expected), f"{name} under {kind}: other tensors than without the engine"
    for key, tensor in results.items():
        wanted = replayed[key]
        if key.endswith("buffer") and not _equal(tensor, wanted):
            wanted = expected[
                key
            ]  # a region that keeps a batch norm's output updates its statistics once, as plain does
        assert _equal(tensor, wanted), _difference(name, kind, key, tensor, wanted)


def _equal(tensor: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    if tensor is None or wanted is None:
        return tensor is wanted
    return tensor.dtype == wanted.dtype and tensor.shape == wanted.shape and torch.equal(_bits(tensor), _bits(wanted))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _difference(name: str, kind: Kind, key: str, tensor: Any, wanted: Any) -> str:
    error = "" if tensor is None or wanted is None else f", largest error {(tensor - wanted).abs().max().item()}"
    return f"{name} under {kind}: {key} differs{error}"
