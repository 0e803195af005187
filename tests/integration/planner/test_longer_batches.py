"""A batch that is longer than the one a plan was fitted on is named, once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import PlanWarning
from hyper_parallel.testing import simulated_accelerator

from .models import VOCABULARY, Transformer, tree_of

SAID = r"Transformer: this batch is longer .* fitted on: ids \(4, 40\), fitted on \(4, 32\)\..*longest batch.*said once"


def steps_of(model: nn.Module) -> Callable[[int, int], Any]:
    def step(batch: int, length: int) -> None:
        model(torch.randint(3, VOCABULARY, (batch, length))).square().mean().backward()

    return step


def said_by(work: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        work()
    return [str(one.message) for one in caught if one.category is PlanWarning]


@pytest.mark.parametrize("budget", [1_400_000, "1GiB"], ids=["planned", "left alone"])
def test_a_longer_batch_is_named_once_also_where_the_budget_is_kept(budget: int | str) -> None:
    model = Transformer()
    step = steps_of(model)
    tree = tree_of(model)
    with simulated_accelerator():
        applied = hp.fit_memory(model, lambda: step(4, 32), budget, steps=1)
        assert said_by(lambda: [step(4, 32), step(4, 16), step(2, 32)]) == []
        with pytest.warns(PlanWarning, match=SAID):
            step(4, 40)
        assert said_by(lambda: [step(4, 48), step(8, 32)]) == []
        applied.remove()
    assert tree_of(model) == tree


def test_fewer_rows_that_are_longer_are_named_too() -> None:
    """Attention grows with the square of the length."""
    model = Transformer()
    step = steps_of(model)
    with simulated_accelerator(), hp.fit_memory(model, lambda: step(4, 32), "1GiB", steps=1):
        (text,) = said_by(lambda: step(1, 48))
    assert "ids (1, 48), fitted on (4, 32)" in text
    assert "budget of 1.00 GiB" in text


def test_the_longest_of_several_forwards_is_what_a_plan_was_fitted_on() -> None:
    model = Transformer()
    step = steps_of(model)
    with simulated_accelerator(), hp.fit_memory(model, lambda: [step(2, 32), step(4, 24)], "1GiB", steps=1):
        assert said_by(lambda: step(4, 32)) == []
        assert len(said_by(lambda: step(5, 8))) == 1


def test_evaluation_and_a_plan_that_was_removed_say_nothing() -> None:
    model = Transformer()
    step = steps_of(model)
    with simulated_accelerator():
        applied = hp.fit_memory(model, lambda: step(4, 32), "1GiB", steps=1)
        with torch.no_grad():
            assert said_by(lambda: model(torch.zeros(8, 64, dtype=torch.long))) == []
        applied.remove()
        assert said_by(lambda: step(8, 64)) == []


def test_a_plan_from_a_file_knows_its_shapes(tmp_path: Path) -> None:
    model = Transformer()
    step = steps_of(model)
    with simulated_accelerator():
        profile = hp.profile_memory(model, lambda: step(4, 32), steps=1)
        hp.plan_memory(profile, 1_400_000, effort=0.2).save(tmp_path / "plan.json")
        with hp.apply_plan(model, hp.Plan.load(tmp_path / "plan.json")):
            assert len(said_by(lambda: [step(4, 32), step(4, 33), step(4, 34)])) == 1


def test_a_step_that_calls_only_the_blocks_is_watched_at_the_first_block() -> None:
    model = Transformer()

    def step(length: int) -> None:
        x = model.embed(torch.randint(3, VOCABULARY, (4, length)))
        for layer in model.layers:
            x = layer(x)
        x.square().mean().backward()

    with simulated_accelerator(), hp.fit_memory(model, lambda: step(32), 1_300_000, steps=1) as applied:
        assert not applied.plan.does_nothing
        assert said_by(lambda: step(32)) == []
        (text,) = said_by(lambda: [step(40), step(41)])
    assert "x (4, 40, 32), fitted on (4, 32, 32)" in text


def test_copies_of_the_model_say_nothing() -> None:
    model = Transformer()
    step = steps_of(model)
    with simulated_accelerator(), hp.fit_memory(model, lambda: step(4, 32), "1GiB", steps=1):
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert said_by(lambda other=other: steps_of(other)(8, 64)) == []
        assert len(said_by(lambda: step(8, 64))) == 1
