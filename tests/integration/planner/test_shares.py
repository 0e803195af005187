"""``budget="90%"`` and ``budget="auto"``: shares of what the simulated accelerator has, and of a card that others use."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch.planner.device_memory import device_memory
from hyper_parallel.backends.torch.planner.meters import AcceleratorMeter
from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.integrations import apply
from hyper_parallel.testing import simulated_accelerator

from .models import assert_same, gradients, transformer, tree_of

FULL_PEAK_SHARE = 0.8


def whole_peak() -> int:
    _, step = transformer()
    with simulated_accelerator() as sim:
        step()
        sim.reset_peak()
        step()
        return sim.peak_bytes


def test_a_percentage_of_the_simulated_accelerator_is_kept_bitwise() -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    capacity = whole_peak()
    with simulated_accelerator(capacity_bytes=capacity):
        applied = hp.fit_memory(model, step, "80%", steps=1)
        assert applied.plan.budget_bytes == int(0.8 * capacity)
        assert applied.measured.peak_bytes <= int(0.8 * capacity)
        assert not applied.plan.does_nothing
        got = gradients(model, step)
        applied.remove()
    assert_same(got, wanted)


def test_auto_leaves_memory_for_optimizer_states_until_they_are_there() -> None:
    model, step = transformer()
    weights = sum(p.nbytes for p in model.parameters())
    with simulated_accelerator(capacity_bytes="4MiB"):
        assert device_memory(model, who="test").expected_state_bytes == 2 * weights  # no optimizer yet: as with Adam
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        assert device_memory(model, who="test").expected_state_bytes == weights
        before = hp.fit_memory(model, step, "auto", steps=1)
        before.remove()
        step()
        optimizer.step()
        optimizer.zero_grad()
        assert device_memory(model, who="test").expected_state_bytes == 0
        after = hp.fit_memory(model, step, "auto", steps=1)
        after.remove()
    assert before.plan.budget_bytes == int(0.9 * 4 * 2**20) - weights
    assert after.plan.budget_bytes == int(0.9 * 4 * 2**20)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda ps: torch.optim.SGD(ps, lr=0.1), 0),
        (lambda ps: torch.optim.AdamW(ps, lr=0.1), 2),
        (lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True), 3),
        (lambda ps: torch.optim.RMSprop(ps, lr=0.1, momentum=0.9, centered=True), 3),
    ],
    ids=["sgd", "adamw", "amsgrad", "rmsprop"],
)
def test_the_states_that_an_optimizer_will_make_are_known(make: Any, states: int) -> None:
    model, step = transformer()
    for parameter in model.embed.parameters():
        parameter.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(trained)
    with simulated_accelerator():
        expected = device_memory(model, who="test").expected_state_bytes
    assert expected == states * sum(p.nbytes for p in trained)
    step()
    optimizer.step()
    made = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim() > 0)
    assert made == expected


def test_plan_memory_takes_a_share_of_the_device_that_was_profiled() -> None:
    model, step = transformer()
    capacity = whole_peak()
    with simulated_accelerator(capacity_bytes=capacity):
        profile = hp.profile_memory(model, step, steps=1)
    assert hp.plan_memory(profile, "80%", effort=0.2).budget_bytes == int(0.8 * capacity)


def test_apply_takes_a_share() -> None:
    model, step = transformer()
    capacity = whole_peak()
    with simulated_accelerator(capacity_bytes=capacity):
        with apply(model, budget="80%", step=step) as treated:
            assert treated.applied[0].plan.budget_bytes == int(0.8 * capacity)
    with pytest.raises(ValueError, match=r"a percentage is above 0 and up to 100"):
        apply(model, budget="120%", step=step)


def test_a_share_without_a_device_is_refused_and_nothing_runs() -> None:
    model, step = transformer()
    tree = tree_of(model)
    with pytest.raises(PlanError, match=r"fit_memory: the model is on cpu.*simulated_accelerator"):
        hp.fit_memory(model, step, "auto")
    with simulated_accelerator(), pytest.raises(PlanError, match=r"simulated accelerator has no limit.*capacity_bytes"):
        hp.fit_memory(model, step, "90%")
    assert tree_of(model) == tree
    assert float(model.forwards) == 0


def test_an_op_that_does_not_fit_on_the_simulated_accelerator_raises() -> None:
    model, step = transformer()
    with simulated_accelerator(capacity_bytes=whole_peak() // 2):
        with pytest.raises(MemoryError, match=r"simulated accelerator: out of memory in aten\."):
            step()
    model.zero_grad()
    with simulated_accelerator(capacity_bytes="64KiB"), pytest.raises(BudgetTooSmallError, match="does not fit on sim"):
        hp.fit_memory(model, step, "100%")


def test_a_step_that_fits_only_with_a_plan_is_fitted_on_a_full_device() -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    capacity = int(FULL_PEAK_SHARE * whole_peak())
    with simulated_accelerator(capacity_bytes=capacity):
        with pytest.raises(MemoryError):
            gradients(model, step)
        model.zero_grad()
        applied = hp.fit_memory(model, step, "95%", steps=1)
        got = gradients(model, step)
        applied.remove()
    assert_same(got, wanted)


class _Card:
    """The part of ``torch.cuda`` that a meter asks, with other processes on the card."""

    total, free, reserved, fraction = 100, 30, 25, 1.0

    def get_device_name(self, device: object) -> str:
        return "a card"

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free, self.total

    def memory_stats(self, device: object) -> dict[str, int]:
        return {"reserved_bytes.all.current": self.reserved}

    def get_per_process_memory_fraction(self, device: object) -> float:
        return self.fraction


def test_other_processes_on_the_card_are_counted_and_a_limit_of_the_process_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = _Card()
    monkeypatch.setattr(torch, "get_device_module", lambda device: card)
    meter = AcceleratorMeter(torch.device("cpu"))
    assert meter.capacity_bytes() == 55  # 45 belong to others
    card.fraction = 0.5
    assert meter.capacity_bytes() == 50
    plain = types.SimpleNamespace(
        get_device_name=card.get_device_name, mem_get_info=card.mem_get_info, memory_stats=card.memory_stats
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: plain)
    assert AcceleratorMeter(torch.device("cpu")).capacity_bytes() == 55
