"""From a budget to a model that keeps it, end to end on the simulated accelerator."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError, PlanError
from hyper_parallel.planner.fit import _Fit, worst_of
from hyper_parallel.testing import simulated_accelerator

from .models import FAMILIES, assert_same, gradients, transformer, tree_of


def plain_peak(model: nn.Module, step: object) -> int:
    """The peak of the second of two steps, the first of which made the gradients."""
    with simulated_accelerator() as sim:
        step()  # type: ignore[operator]
        sim.reset_peak()
        step()  # type: ignore[operator]
        peak = sim.peak_bytes
    for parameter in model.parameters():
        parameter.grad = None
    return peak


@pytest.mark.parametrize("share", [0.55, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_under_budget_with_bitwise_gradients(family: str, share: float) -> None:
    model, step = FAMILIES[family]()
    wanted = gradients(model, step)
    tree = tree_of(model)
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    peak = plain_peak(model, step)
    budget = fixed + int(share * (peak - fixed))
    with simulated_accelerator() as sim:
        applied = hp.fit_memory(model, step, budget, steps=1)
        measured = applied.measured.peak_bytes
        assert measured <= budget
        assert measured == pytest.approx(applied.plan.predicted_peak_bytes, rel=0.05)
        assert all(p.grad is None for p in model.parameters())
        step()
        sim.reset_peak()
        step()  # with gradients there, as it was measured
        assert sim.peak_bytes <= budget
        for parameter in model.parameters():
            parameter.grad = None
        got = gradients(model, step)
        applied.remove()
    assert_same(got, wanted)
    assert tree_of(model) == tree


def test_a_step_that_fits_is_left_alone() -> None:
    model, step = transformer()
    tree = tree_of(model)
    budget = 2 * plain_peak(model, step)
    with simulated_accelerator() as sim:
        applied = hp.fit_memory(model, step, budget, steps=1)
        before = sim.swapped_bytes
        assert {**tree_of(model), "": None} == {**tree, "": None}
        assert tree_of(model)[""][-1] == [0, 1, 0, 0]  # a look at the shapes of each batch, and nothing else
        step()
        assert sim.swapped_bytes == before
        assert applied.plan.does_nothing
        assert applied.num_regions == 0
        assert applied.measured.peak_bytes == applied.plan.predicted_peak_bytes <= budget
        assert applied.stats().swapped_out_bytes == 0
        applied.remove()
    assert tree_of(model) == tree


def test_a_plan_that_misses_is_made_again() -> None:
    """Bytes that come after the profile are found by measuring, and the next plan makes room for them."""
    model, step = transformer()
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    budget = fixed + int(0.75 * (plain_peak(model, step) - fixed))
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        held = torch.zeros(60_000, dtype=torch.uint8) + 1  # counted by the device from here on
        applied = hp.fit_memory(model, step, budget, profile=profile, steps=1)
        applied.remove()
    assert len(applied.history) > 1
    assert applied.history[0]["measured_peak_bytes"] > budget
    assert applied.measured.peak_bytes <= budget
    assert applied.measured.peak_bytes == pytest.approx(applied.plan.predicted_peak_bytes, rel=0.03)
    assert held.numel() == 60_000


def test_a_miss_that_repeats_is_answered_with_more_than_what_was_missing() -> None:
    model, step = transformer()
    fit = _Fit(model, step, 1_000_000, None, None, 0.03, 5, 1)
    assert [fit._margin(over) for over in (764, -5, 764, 764, 5000)] == [0, 0, 1000, 2000, 20_000]


def test_a_budget_that_one_attempt_does_not_keep_says_by_how_much() -> None:
    """Bytes that come after the profile, more than any plan can make room for."""
    model, step = transformer()
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    budget = fixed + int(0.75 * (plain_peak(model, step) - fixed))
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        held = torch.zeros(budget, dtype=torch.uint8) + 1  # counted by the device from here on
        with pytest.raises(BudgetTooSmallError, match=r"not kept in 1 attempts; .* at least .* too many") as caught:
            hp.fit_memory(model, step, budget, steps=1, attempts=1, profile=profile)
    assert held.numel() == budget
    assert caught.value.smallest_peak_bytes is not None
    assert caught.value.smallest_peak_bytes > budget


def test_a_budget_below_everything_names_the_smallest_peak() -> None:
    model, step = transformer()
    tree = tree_of(model)
    weights = sum(p.nbytes for p in model.parameters())
    with simulated_accelerator():
        with pytest.raises(BudgetTooSmallError, match=r"the smallest peak found is .*weights 213\.99 KiB"):
            hp.fit_memory(model, step, weights, steps=1)
    assert tree_of(model) == tree
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("budget", "kind", "text"),
    [
        ("20 potatoes", ValueError, r"cannot read '20 potatoes' as bytes"),
        ("", ValueError, r"cannot read '' as bytes"),
        (0, ValueError, r"is no memory at all"),
        ("0GiB", ValueError, r"is no memory at all"),
        (-1, ValueError, r"negative"),
        ("-3GiB", ValueError, r"negative"),
        (None, TypeError, r"expected bytes as an int or a string such as '20GiB', got None"),
        (True, TypeError, r"expected bytes"),
        (2.5, TypeError, r"expected bytes"),
    ],
)  # fmt: skip
def test_what_is_no_budget(budget: object, kind: type[Exception], text: str) -> None:
    model, step = transformer()
    tree = tree_of(model)
    with simulated_accelerator(), pytest.raises(kind, match=text) as caught:
        hp.fit_memory(model, step, budget)  # type: ignore[arg-type]
    assert not isinstance(caught.value, BudgetTooSmallError)
    assert tree_of(model) == tree
    assert float(model.forwards) == 0  # no step was run for it


def test_what_else_is_refused_before_a_step_runs() -> None:
    model, step = transformer()
    with simulated_accelerator():
        with pytest.raises(ValueError, match=r"tolerance is a share between 0 and 1"):
            hp.fit_memory(model, step, "1GiB", tolerance=3)
        with pytest.raises(ValueError, match=r"attempts is a whole number, 1 or more; got 0"):
            hp.fit_memory(model, step, "1GiB", attempts=0)
        with pytest.raises(TypeError, match=r"expected a Profile, got dict"):
            hp.fit_memory(model, step, "1GiB", profile={})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got NoneType"):
            hp.fit_memory(None, step, "1GiB")
        with pytest.raises(PlanError, match=r"has no repeated blocks"):
            hp.fit_memory(nn.Linear(2, 2), step, "1GiB")
    assert float(model.forwards) == 0


def test_a_step_without_a_backward_is_refused() -> None:
    model, _ = transformer()
    ids = torch.ones(2, 5, dtype=torch.long)
    with simulated_accelerator(), pytest.raises(PlanError, match=r"never ran a backward"):
        hp.fit_memory(model, lambda: model(ids).sum(), "1GiB")
    assert float(model.forwards) == 0


def test_a_loop_that_drops_its_gradients_stays_within_the_budget() -> None:
    """Trial steps measure with gradients in place; most loops make them anew in every backward."""
    model, step = transformer()
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    budget = fixed + int(0.7 * (plain_peak(model, step) - fixed))
    with simulated_accelerator() as simulation:
        with hp.fit_memory(model, step, budget, steps=1):
            for _ in range(3):
                model.zero_grad()
                simulation.reset_peak()
                step()
                assert simulation.peak_bytes <= budget


def test_a_step_with_an_optimizer_is_stopped_before_it_changes_anything_also_when_the_budget_is_too_small() -> None:
    model, step = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step()  # gradients that must be there afterwards
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    tree, forwards, state = tree_of(model), model.forwards.clone(), torch.get_rng_state()

    def training_step() -> None:
        optimizer.zero_grad()
        step()
        optimizer.step()

    for budget in (1, 2**40):
        with simulated_accelerator(), pytest.raises(PlanError, match=r"calls AdamW\.step\(\).* as they were"):
            hp.fit_memory(model, training_step, budget, steps=1)
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
        assert not optimizer.state
        assert torch.equal(model.forwards, forwards)
        assert torch.equal(torch.get_rng_state(), state)
        assert tree_of(model) == tree
    training_step()  # outside a trial an optimizer works as ever
    assert optimizer.state


def test_a_refusal_names_weights_that_the_step_changed_by_hand() -> None:
    model, step = transformer()

    def training_step() -> None:
        step()
        with torch.no_grad():
            model.head.weight.mul_(0.5)

    budget = sum(p.nbytes for p in model.parameters())
    with simulated_accelerator():
        with pytest.raises(
            BudgetTooSmallError, match=r"cannot hold this step.* parameters were changed \(head\.weight\)"
        ):
            hp.fit_memory(model, training_step, budget, steps=1)


@pytest.mark.parametrize("is_strided", [False, True])
def test_weights_that_the_step_changed_through_data_are_named(is_strided: bool) -> None:
    """Which moves no version."""
    model, step = transformer()
    if is_strided:
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().t().contiguous().t())

    def training_step() -> None:
        step()
        model.head.weight.data -= 0.1 * model.head.weight.grad

    for budget, error in ((1, BudgetTooSmallError), (2**40, PlanError)):
        with simulated_accelerator(), pytest.raises(error, match=r"parameters were changed \(head\.weight\)"):
            hp.fit_memory(model, training_step, budget, steps=1)


def test_another_models_optimizer_may_step() -> None:
    model, step = transformer()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def two_steps() -> None:
        step()
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with simulated_accelerator():
        hp.fit_memory(model, two_steps, "1GiB", steps=1).remove()


def test_the_worst_rank_decides() -> None:
    model, step = transformer()
    with simulated_accelerator():
        one = hp.profile_memory(model, step, steps=1)
    two = dataclasses.replace(
        one,
        measured=dataclasses.replace(one.measured, peak_bytes=one.measured.peak_bytes + 5, step_seconds=1e-9),
        link=dataclasses.replace(one.link, out_bytes_per_second=1.0),
        far=dataclasses.replace(one.far, host_bytes=7),
    )
    worst = worst_of([one, two])
    assert worst.measured.peak_bytes == one.measured.peak_bytes + 5
    assert worst.measured.step_seconds == one.measured.step_seconds
    assert worst.link.out_bytes_per_second == 1.0
    assert worst.link.in_bytes_per_second == one.link.in_bytes_per_second
    assert worst.far.host_bytes == 7
    stranger = dataclasses.replace(one, model_fingerprint="another")
    with pytest.raises(PlanError, match=r"the ranks hold 2 different models"):
        worst_of([one, stranger])
