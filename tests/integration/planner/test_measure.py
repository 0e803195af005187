"""What ``measure_step`` says of a step: its peak by moment, and nothing that the trial itself puts aside."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel.backends.torch.planner.measure import measure_step
from hyper_parallel.backends.torch.planner.meters import SimulatedMeter
from hyper_parallel.backends.torch.planner.trial_guard import restored_after
from hyper_parallel.testing import simulated_accelerator

from .models import transformer


def test_the_highest_moment_is_the_peak() -> None:
    model, step = transformer()
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2].isdigit()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    with simulated_accelerator():
        measured = measure_step(model, step, steps=1, blocks=names)
        without = measure_step(model, step, steps=1)
    assert measured.moments is not None
    assert max(measured.moments) == measured.peak_bytes == without.peak_bytes
    assert all(measured.moments)
    assert without.moments is None
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert measured.retries == 0


def test_gradients_that_wait_for_the_end_of_a_trial_are_not_on_the_device() -> None:
    """The step drops them, as most loops do, so their bytes are free while it runs."""
    model, step = transformer()

    def dropping() -> None:
        model.zero_grad(set_to_none=True)
        step()

    with simulated_accelerator() as sim:
        free = measure_step(model, dropping, steps=1).peak_bytes
        assert all(parameter.grad is None for parameter in model.parameters())
        step()
        values = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
        assert measure_step(model, dropping, steps=1).peak_bytes == free
        held = sim.live_bytes
    now = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
    assert now == values
    assert held < free


def test_a_gradient_that_somebody_holds_is_the_same_tensor_afterwards() -> None:
    model, step = transformer()
    with simulated_accelerator():
        step()
        held = {name: parameter.grad for name, parameter in model.named_parameters()}
        values = {name: gradient.tolist() for name, gradient in held.items()}
        with restored_after(model, torch.device("cpu"), who="test"):
            model.zero_grad(set_to_none=True)
            step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is held[name]
        assert parameter.grad.tolist() == values[name]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_step_that_retries_is_measured_again_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    """Retries that come from what earlier trials left in the cache are gone then; others are not."""
    model, step = transformer()
    asked, released = [], []

    def retries(self: SimulatedMeter) -> int:
        asked.append(1)
        return len(asked) if is_counted or not released else 0

    monkeypatch.setattr(SimulatedMeter, "retries", retries)
    monkeypatch.setattr(SimulatedMeter, "release_cached", lambda self: released.append(1))
    with simulated_accelerator():
        measured = measure_step(model, step, steps=1)
    assert released == [1]
    assert (measured.retries > 0) == is_counted
