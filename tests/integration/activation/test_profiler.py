"""What a user sees of the engine in torch's own profiler."""

from __future__ import annotations

import torch

import hyper_parallel as hp
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


def test_no_range_is_opened_without_a_profiler(monkeypatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a range {name} was opened though no profiler runs")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    with simulated_accelerator(window_bytes=0) as sim:
        run_step()
    assert sim.swapped_bytes > 0
