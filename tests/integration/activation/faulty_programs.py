"""Small steps that swap, for tests that put faults into the device. Each also runs plainly, with ``sim`` None."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint import engine
from hyper_parallel.core.activation_checkpoint.swap import SwapTensor
from hyper_parallel.simulation.simulation import Simulation
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream

from .device_faults import FAULTS, Program

__all__ = ["PROGRAMS"]

UNIT = 32 * 4
"""The bytes of every activation."""


class Sines(nn.Module):
    """Saves ``count`` storages of one unit each, none of which the caller holds."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0  # the caller's own tensor is not saved: its bytes would live whatever the engine does
        for _ in range(self.count):
            x = x.sin()
        return x


def swapped(module: nn.Module, sim: Simulation | None) -> Callable[..., torch.Tensor]:
    return module if sim is None else hp.swap_wrapper(module)


def leaf(floats: int = UNIT // 4) -> torch.Tensor:
    return torch.linspace(0, 1, floats).requires_grad_()


def one_step(sim: Simulation | None) -> list[torch.Tensor]:
    x = leaf()
    swapped(Sines(4), sim)(x).sum().backward()
    return [x.grad]


def two_steps(sim: Simulation | None) -> list[torch.Tensor]:
    layer, gradients = swapped(Sines(3), sim), []
    for _ in range(2):
        x = leaf()
        layer(x).sum().backward()
        gradients.append(x.grad)
    return gradients


def two_backwards(sim: Simulation | None) -> list[torch.Tensor]:
    x = leaf()
    loss = swapped(Sines(3), sim)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]


def two_micro_batches(sim: Simulation | None) -> list[torch.Tensor]:
    layer, inputs = swapped(Sines(3), sim), [leaf(), leaf()]
    losses = [layer(x).sum() for x in inputs]
    for loss in losses:
        loss.backward()
    return [x.grad for x in inputs]


def a_graph_dies(sim: Simulation | None) -> list[torch.Tensor]:
    swapped(Sines(4), sim)(leaf())
    return [torch.ones(4) + 1]


def a_part_of_the_graph(sim: Simulation | None) -> list[torch.Tensor]:
    """A load runs ahead to a value that this backward never asks for, and is let go."""
    x = leaf()
    middle = swapped(Sines(1), sim)(x)
    out = swapped(Sines(3), sim)(middle)
    (gradient,) = torch.autograd.grad(out.sum(), middle, retain_graph=True)
    out.sum().backward()
    return [gradient, x.grad]


def inputs_of_recomputed_layers(sim: Simulation | None) -> list[torch.Tensor]:
    x = leaf()
    value = x + 0
    for _ in range(3):
        value = Sines(2)(value) if sim is None else hp.checkpoint(Sines(2), value, swap_inputs=True)
    value.sum().backward()
    return [x.grad]


class ChangedInPlace(nn.Module):
    """The output of an op that a policy swaps is changed in place before its layer ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.weight
        hidden += x
        return (hidden @ self.weight).tanh()


def a_swapped_value_is_changed_in_place(sim: Simulation | None) -> list[torch.Tensor]:
    layer, x = ChangedInPlace(), torch.linspace(0, 1, 32).reshape(4, 8).requires_grad_()
    wrapped = layer if sim is None else hp.checkpoint_wrapper(layer, policy_fn=_swap_every_op)
    wrapped(wrapped(x + 0)).sum().backward()
    return [x.grad, layer.weight.grad]


def _swap_every_op(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


def driven_by_hand(sim: Simulation | None) -> list[torch.Tensor]:
    value = torch.linspace(0, 1, 32)
    if sim is None:
        return [value * 2]
    tensor = SwapTensor(value, "by hand")
    del value
    tensor.async_offload()
    tensor.wait_offload()
    tensor.resize_device_storage()
    tensor.async_load()
    tensor.wait_load()
    return [tensor.get_val() * 2]


def room_under_a_load(sim: Simulation | None) -> list[torch.Tensor]:
    """A backward raised: its loads are queued, and their room in far memory is lent to values saved before."""
    floats = 256  # four of these fill the one page that far memory may take

    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError("told to")

    with _host_that_looks_too_early(sim):
        x = leaf(floats)
        middle = swapped(Sines(3), sim)(x)
        middle.register_hook(stop)
        out = swapped(Sines(5), sim)(middle)
        with pytest.raises(ArithmeticError, match="told to"):
            out.sum().backward()
        side = other_stream(sim)  # what the first stream lets go does not order it after the loads
        with on_stream(sim, side):
            y = leaf(floats)
            half = swapped(Sines(4), sim)(y)
        del out, middle
        with on_stream(sim, side):
            swapped(Sines(4), sim)(half).sum().backward()
        wait_for(sim, side)
    return [y.grad]


@contextlib.contextmanager
def _host_that_looks_too_early(sim: Simulation | None) -> Iterator[None]:
    """Only what is ordered by events is ordered; nothing is seen to be done."""
    with pytest.MonkeyPatch.context() as patch:
        if sim is not None:
            patch.setattr(sim.timeline, "is_done", lambda event: False)
        yield


def other_stream(sim: Simulation | None) -> SimulatedStream:
    """A second compute stream, which has seen everything that the first one has queued so far."""
    side = SimulatedStream("side", runs_at_once=True)
    if sim is not None:
        sim.timeline.wait(side, SimulatedEvent(sim.timeline.compute))
    return side


@contextlib.contextmanager
def on_stream(sim: Simulation | None, stream: SimulatedStream) -> Iterator[None]:
    """Kernels go to ``stream`` inside."""
    if sim is None:
        yield
        return
    main, sim.timeline.compute = sim.timeline.compute, stream
    try:
        yield
    finally:
        sim.timeline.compute = main


def wait_for(sim: Simulation | None, stream: SimulatedStream) -> None:
    if sim is not None:
        sim.timeline.wait(sim.timeline.compute, SimulatedEvent(stream))


def a_load_on_another_stream(sim: Simulation | None) -> list[torch.Tensor]:
    """The second stream never saw the copy out: the first one lets the bytes go after it was made."""
    x = leaf()
    out = swapped(Sines(1), sim)(x)
    side = other_stream(sim)
    more = swapped(Sines(1), sim)(leaf())
    with on_stream(sim, side):
        out.sum().backward()
    wait_for(sim, side)
    del out, more
    return [x.grad]


def a_reader_on_another_stream(sim: Simulation | None) -> list[torch.Tensor]:
    """The bytes come back into a buffer of the first stream, the second reads them, and the first lets them go."""
    out = swapped(Sines(1), sim)(leaf())
    assert out.grad_fn._saved_self is not None
    side = other_stream(sim)
    with on_stream(sim, side):
        twice = out.grad_fn._saved_self * 2
    del out
    wait_for(sim, side)
    return [twice]


def a_reader_on_a_stream_that_never_saw_the_load(sim: Simulation | None) -> list[torch.Tensor]:
    """The second stream is there before the first one brings the bytes back."""
    out = swapped(Sines(1), sim)(leaf())
    side = other_stream(sim)
    assert out.grad_fn._saved_self is not None
    with on_stream(sim, side):
        twice = out.grad_fn._saved_self * 2
    wait_for(sim, side)
    return [twice]


@contextlib.contextmanager
def _small_batches() -> Iterator[None]:
    """A batch may have as many bytes as the window and the prefetch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_BATCHES_IN_WINDOW", 1)
        patch.setattr(engine, "_BATCHES_IN_PREFETCH", 1)
        yield


def one_step_in_batches(sim: Simulation | None) -> list[torch.Tensor]:
    x = leaf()
    with _small_batches():
        swapped(Sines(7), sim)(x).sum().backward()
    return [x.grad]


def two_steps_in_batches(sim: Simulation | None) -> list[torch.Tensor]:
    """The second step's copies out use the room of the first step's loads."""
    layer, gradients = swapped(Sines(4), sim), []
    with _small_batches(), _host_that_looks_too_early(sim):
        for _ in range(2):
            x = leaf()
            layer(x).sum().backward()
            gradients.append(x.grad)
    return gradients


def a_graph_dies_in_batches(sim: Simulation | None) -> list[torch.Tensor]:
    with _small_batches():
        swapped(Sines(5), sim)(leaf())
    return [torch.ones(4) + 1]


def a_part_of_the_graph_in_batches(sim: Simulation | None) -> list[torch.Tensor]:
    with _small_batches():
        return a_part_of_the_graph(sim)


def _program(
    steps: Callable[[Simulation | None], list[torch.Tensor]], faults: tuple[str, ...] = FAULTS, **settings: Any
) -> Program:
    words = ", ".join(f"{name.removesuffix('_bytes')} {value}" for name, value in settings.items())
    units = {name: value * UNIT if name.endswith("_bytes") else value for name, value in settings.items()}
    return Program(" ".join(filter(None, (steps.__name__, words and f"({words})"))), steps, units, faults)


PROGRAMS = (
    _program(one_step, window_bytes=0, prefetch_bytes=0),
    _program(one_step, window_bytes=1, prefetch_bytes=1),
    _program(one_step, window_bytes=1, prefetch_bytes=9),
    _program(one_step, window_bytes=9, prefetch_bytes=0),
    _program(one_step, faults=("wait",), window_bytes=0, prefetch_bytes=2, verify=True),
    _program(one_step, window_bytes=1, prefetch_bytes=2, tiers=("pageable",)),
    _program(two_steps, window_bytes=1, prefetch_bytes=2, host_limit=4096),
    _program(two_backwards, window_bytes=1, prefetch_bytes=9),
    _program(two_micro_batches, window_bytes=1, prefetch_bytes=9),
    _program(a_graph_dies, window_bytes=9, prefetch_bytes=0),
    _program(a_part_of_the_graph, window_bytes=1, prefetch_bytes=9),
    _program(inputs_of_recomputed_layers, window_bytes=1, prefetch_bytes=1),
    _program(a_swapped_value_is_changed_in_place, faults=("wait", "event"), window_bytes=9, prefetch_bytes=9),
    _program(driven_by_hand, window_bytes=9, prefetch_bytes=0),
    _program(room_under_a_load, window_bytes=8, prefetch_bytes=99, tail_bytes=32, host_limit=4096),
    _program(a_load_on_another_stream, window_bytes=1, prefetch_bytes=0),
    _program(a_reader_on_another_stream, window_bytes=0, prefetch_bytes=0),
    _program(a_reader_on_a_stream_that_never_saw_the_load, window_bytes=0, prefetch_bytes=0),
    _program(one_step_in_batches, window_bytes=3, prefetch_bytes=3),
    _program(two_steps_in_batches, window_bytes=2, prefetch_bytes=2, host_limit=4096),
    _program(a_graph_dies_in_batches, window_bytes=3, prefetch_bytes=0),
    _program(a_part_of_the_graph_in_batches, window_bytes=2, prefetch_bytes=2),
)
