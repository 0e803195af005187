"""Every family under every treatment: bitwise gradients, bytes that really left, a lower peak, unchanged names."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import native
from hyper_parallel.testing import simulated_accelerator

from .steps import Result, assert_bitwise_equal, seeded_step
from .treatments import TREATMENTS
from .zoo import FAMILIES, build, wrap_layers

WINDOW_BYTES = 16384


@pytest.fixture(scope="module")
def plain_step() -> Callable[[str], tuple[Result, int]]:
    """The step without the engine, and its peak on the simulated device; made once per family."""
    made: dict[str, tuple[Result, int]] = {}

    def step(name: str) -> tuple[Result, int]:
        if name not in made:
            model, batch = build(name), FAMILIES[name].batch(0)
            with simulated_accelerator() as sim:
                result = seeded_step(model, batch)
            assert sim.swapped_bytes == 0
            made[name] = result, sim.peak_bytes
        return made[name]

    return step


def count_runs_of_first_layer(name: str, model: Any) -> list[int]:
    """A one-element list that counts how often the first module inside the first layer runs."""
    counted = [0]

    def count(module: Any, args: Any) -> None:
        counted[0] += 1

    first_layer = next(FAMILIES[name].layer_lists(model))[0]
    leaf = next(module for module in first_layer.modules() if not list(module.children()))
    leaf.register_forward_pre_hook(count)
    return counted


@pytest.mark.parametrize("timing", ["lazy", "random"])
@pytest.mark.parametrize("treatment_name", TREATMENTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_step_is_bitwise_the_plain_one(
    name: str, treatment_name: str, timing: str, plain_step: Callable[[str], tuple[Result, int]]
) -> None:
    wanted, plain_peak = plain_step(name)
    treatment = TREATMENTS[treatment_name]
    model, batch = build(name), FAMILIES[name].batch(0)
    wrap_layers(name, model, treatment.wrap)
    runs = count_runs_of_first_layer(name, model)
    with simulated_accelerator(timing=timing, seed=11, window_bytes=WINDOW_BYTES) as sim:
        got = seeded_step(model, batch, around_forward=treatment.around_forward)
        stats = hp.stats()
    assert_bitwise_equal(got, wanted)
    runs_python_again = native.load() is None
    assert runs[0] == (2 if treatment.recomputes and runs_python_again else 1)
    regions = sum(map(len, FAMILIES[name].layer_lists(model))) if treatment.has_regions else 0
    assert stats.regions_from_tape == (0 if runs_python_again else regions)
    assert sum(stats.regions_from_python.values()) == (regions if runs_python_again else 0)
    assert (sim.swapped_bytes > 0) == treatment.swaps
    assert stats.swapped_out_bytes == sim.swapped_bytes
    assert sim.peak_bytes < plain_peak, f"peak {sim.peak_bytes} is not below the plain step's {plain_peak}"


@pytest.mark.parametrize("name", FAMILIES)
def test_two_steps_leave_nothing_behind(name: str) -> None:
    model = build(name)
    wrap_layers(name, model, hp.swap_wrapper)
    with simulated_accelerator(window_bytes=WINDOW_BYTES) as sim:
        seeded_step(model, FAMILIES[name].batch(0))
        gc.collect()
        after_one = sim.live_bytes
        seeded_step(model, FAMILIES[name].batch(1))
        gc.collect()
        assert hp.stats().live_records == 0
        assert sim.live_bytes <= after_one


@pytest.mark.parametrize("wrap", [hp.swap_wrapper, hp.checkpoint_wrapper], ids=["swap", "checkpoint"])
@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_state_are_those_of_the_unwrapped_model(name: str, wrap: Callable[[Any], Any]) -> None:
    plain, model = build(name), build(name)
    wrap_layers(name, model, wrap)
    state, wanted = model.state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
    assert [key for key, _ in model.named_buffers()] == [key for key, _ in plain.named_buffers()]
    assert [key for key, _ in model.named_modules()] == [key for key, _ in plain.named_modules()]
    assert model.num_parameters() == plain.num_parameters()
    assert plain.load_state_dict(state).missing_keys == []
    assert model.load_state_dict(wanted).unexpected_keys == []
