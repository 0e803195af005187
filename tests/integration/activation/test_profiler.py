"""What a user sees of the engine in torch's own profiler."""

from __future__ import annotations

import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import native
from hyper_parallel.testing import simulated_accelerator


def run_step() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    hp.swap(lambda value: value.exp().sin().exp(), x).sum().backward()


def test_copies_are_ranges_in_the_profiler() -> None:
    with simulated_accelerator(window_bytes=0) as sim, torch.profiler.profile() as profile:
        run_step()
    ranges = {event.key: event.count for event in profile.key_averages() if event.key.startswith("hyper_parallel")}
    assert ranges == {
        "hyper_parallel: copy out": [what for what, _ in sim.events].count("offload"),
        "hyper_parallel: copy back": [what for what, _ in sim.events].count("load"),
    }
    assert ranges["hyper_parallel: copy out"] == 2, "two exponentials; what sin saves is the first of them again"


def test_a_replay_from_a_tape_is_a_range_in_the_profiler() -> None:
    """Around the ops that it runs. Where Python runs again the ops lie in the ranges of the modules that run them."""
    x = torch.randn(16, 16, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos().exp()

    loss = hp.checkpoint(region, hp.checkpoint(region, x)).sum()  # probation is in forward: no profiler runs yet
    with torch.profiler.profile() as profile:
        loss.backward()
    name = "hyper_parallel: replay"
    inside = [
        event.name for event in profile.events() if event.cpu_parent is not None and event.cpu_parent.name == name
    ]
    ranges = [event for event in profile.events() if event.name == name]
    regions = 0 if native.load() is None else 2
    assert len(ranges) == regions
    assert inside == ["aten::sin", "aten::cos", "aten::exp"] * regions


def test_no_range_is_opened_without_a_profiler(monkeypatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a range {name} was opened though no profiler runs")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    with simulated_accelerator(window_bytes=0) as sim:
        run_step()
    assert sim.swapped_bytes > 0
