"""A step on two compute streams: who frees what, behind which reader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.activation_checkpoint.residency import Residency
from hyper_parallel.simulation.streams import SimulatedEvent, SimulatedStream
from hyper_parallel.testing import simulated_accelerator

from .helpers import live_records

Timeline = Any  # hyper_parallel.simulation.streams.Timeline


@contextlib.contextmanager
def _on(timeline: Timeline, stream: SimulatedStream) -> Iterator[None]:
    """Kernels go to ``stream`` inside, behind what was queued so far, as autograd and users order them."""
    before = timeline.compute
    _wait(timeline, stream, before)
    timeline.compute = stream
    try:
        yield
    finally:
        timeline.compute = before


def _wait(timeline: Timeline, stream: SimulatedStream, other: SimulatedStream) -> None:
    timeline.tick(other)
    timeline.wait(stream, SimulatedEvent(other))


_READ: list[torch.Tensor] = []
"""What backward made of the values: its bytes belong to a stream that nobody waits for yet."""


class _Scaled(torch.autograd.Function):
    """``x * scale``; backward reads the scale on the stream of its own, if it has one, and waits for nobody after."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, timeline: Any, stream: Any) -> torch.Tensor:
        ctx.save_for_backward(scale)
        ctx.where = timeline, stream
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        timeline, stream = ctx.where
        with contextlib.nullcontext() if stream is None else _on(timeline, stream):
            (scale,) = ctx.saved_tensors
            _READ.append(scale.sum())
        return torch.full_like(grad, 2), None, None, None


def test_a_buffer_that_one_stream_loads_and_another_reads_first() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=10**6) as sim:
        main, side = sim.timeline.compute, SimulatedStream("side", runs_at_once=True)
        x = torch.ones(16, requires_grad=True)

        def branches(x: torch.Tensor) -> torch.Tensor:
            aside = _Scaled.apply(x, x.detach() * 3, sim.timeline, side)
            here = _Scaled.apply(x, x.detach() * 5, None, None)
            return _Scaled.apply(aside + here, x.detach() * 7, None, None)

        hp.swap(branches, x).sum().backward()
        assert [what for what, _ in sim.events].count("load") == 3
        assert sim.violations == []
        _wait(sim.timeline, main, side)
        _READ.clear()


@pytest.mark.parametrize("window_bytes", [0, 64, 10**6])
def test_a_source_that_one_stream_allocates_and_another_saves(window_bytes: int) -> None:
    with simulated_accelerator(window_bytes=window_bytes) as sim:
        main, side = sim.timeline.compute, SimulatedStream("side", runs_at_once=True)
        x = torch.ones(16, requires_grad=True)

        def branches(x: torch.Tensor) -> torch.Tensor:
            scale = x.detach() * 3
            with _on(sim.timeline, side):
                aside = _Scaled.apply(x, scale, None, None)
            _wait(sim.timeline, main, side)
            del scale
            return _Scaled.apply(aside, x.detach() * 5, None, None)

        out = hp.swap(branches, x)
        assert ("offload", 64) in sim.events
        assert sim.violations == []
        del out
        assert sim.violations == []


def test_a_replay_does_not_let_go_of_what_another_stream_goes_on_reading() -> None:
    with simulated_accelerator(window_bytes=0, prefetch_bytes=0) as sim:
        main, side = sim.timeline.compute, SimulatedStream("side", runs_at_once=True)
        out = hp.swap(torch.sin, torch.ones(16, requires_grad=True) * 2)
        (reference,) = live_records()
        record = reference()
        assert record is not None
        for reader, stays in ((main, Residency.HOST), (side, Residency.DEVICE)):
            record.engine.launch_load(record)
            with _on(sim.timeline, reader):
                record.engine.fetch(record, None)
                record.engine.drop_after_replay(record)
            assert record.residency is stays
        del out, record
