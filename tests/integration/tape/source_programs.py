"""One small program for each named fault of the answers about saved tensors (``native/sources.h``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import AsyncSaveOnCpu
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.testing import simulated_accelerator

__all__ = ["SOURCE_PROGRAMS"]

Function = Callable[[torch.Tensor], torch.Tensor]


def leaf(size: int = 64) -> torch.Tensor:
    return torch.linspace(0, 1, size).requires_grad_()


def swapped(function: Function, *, size: int = 64, prefetch_bytes: int | None = None) -> Simulation:
    """Compare a swapped step with the plain one."""
    (wanted,) = torch.autograd.grad(function(x := leaf(size)).sum(), x)
    with simulated_accelerator(window_bytes=0, prefetch_bytes=prefetch_bytes) as sim:
        (got,) = torch.autograd.grad(hp.swap(function, x := leaf(size)).sum(), x)
    assert torch.equal(got, wanted)
    return sim


def pieces_that_change_one_after_the_other() -> None:
    """Each piece saves itself at version 1 of its own counter."""

    def gates(x: torch.Tensor) -> torch.Tensor:
        left, right = (x * 2).unsafe_chunk(2)
        return left.sigmoid_().sum() + right.exp_().sum()

    swapped(gates)


def addresses_that_come_again() -> None:
    """Storages die and give their addresses to others while the records of the first ones live."""

    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x.sin()
        return x

    swapped(sines, prefetch_bytes=0)


def what_a_backward_saves_stays() -> None:
    made: list[torch.Tensor] = []

    def save(gradient: torch.Tensor) -> None:
        with torch.enable_grad(), AsyncSaveOnCpu():
            made.append(leaf().exp())

    with simulated_accelerator(window_bytes=0) as sim:
        out = leaf().sin()
        out.register_hook(save)
        out.sum().backward()
        assert sim.swapped_bytes == 0
        assert hp.stats().kept_count == {"saved_during_backward": 1}


def a_view_of_a_parameter_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(32, 64))
    with simulated_accelerator(window_bytes=0) as sim:
        hp.swap(lambda x: x @ weight.t(), torch.ones(4, 64, requires_grad=True)).sum().backward()
    assert sim.swapped_bytes == 4 * 64 * 4, "the batch alone"


def a_value_that_changed_since_its_save_raises() -> None:
    with simulated_accelerator(window_bytes=0):
        x = leaf()
        middle = x * 2
        out = hp.swap(torch.sin, middle)
        with torch.no_grad():
            middle.add_(1)
        with pytest.raises(InPlaceChangeError, match="saved at version 0, now at version 1"):
            out.sum().backward()


def a_view_that_is_saved_again_counts_with_its_source() -> None:
    """A backward inside forward reads the saved input and saves it once more, for the second derivative."""

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]

    with simulated_accelerator():
        x = leaf()
        loss = hp.swap(slope, x).sum()
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(InPlaceChangeError, match="changed in place after it was saved"):
            loss.backward()


SOURCE_PROGRAMS: dict[str, Callable[[], None]] = {
    "own_counters": pieces_that_change_one_after_the_other,
    "storage_watch": addresses_that_come_again,
    "in_backward": what_a_backward_saves_stays,
    "saved_parameters": a_view_of_a_parameter_stays,
    "source_version": a_value_that_changed_since_its_save_raises,
    "source_counter": a_view_that_is_saved_again_counts_with_its_source,
}
"""A fault's name, and the program that catches it."""
