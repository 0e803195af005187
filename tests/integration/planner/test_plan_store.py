"""A store of plans: a restart with the same step plans nothing; anything that differs plans anew."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import PlanWarning
from hyper_parallel.planner import fit
from hyper_parallel.testing import simulated_accelerator

from .models import FAMILIES, VOCABULARY, Transformer, assert_same, gradients, transformer, tree_of

BUDGET = 1_400_000  # of the 1.68 MB that the step takes
ENOUGH = 2_200_000


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        yield


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every profile that a fit makes."""
    made: list[int] = []
    whole = fit._Fit._profile

    def counted(self: fit._Fit) -> Any:
        made.append(1)
        return whole(self)

    monkeypatch.setattr(fit._Fit, "_profile", counted)
    return made


def fitted(model: nn.Module, step: Callable[[], Any], store: Path, budget: int | str = BUDGET, **options: Any) -> Any:
    options.setdefault("steps", 1)
    return hp.fit_memory(model, step, budget, store=store, **options)


def with_batch(batch: int, length: int, model: nn.Module | None = None) -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(1)
    model = Transformer() if model is None else model
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(5))

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        return loss.detach()

    return model, step


def test_a_restart_plans_nothing_and_keeps_the_budget_bitwise(tmp_path: Path, profiled: list[int]) -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    with simulated_accelerator():
        first = fitted(model, step, tmp_path)
        first.remove()
    assert profiled == [1]
    (file,) = tmp_path.iterdir()
    assert hp.Plan.load(file).blocks == first.plan.blocks
    again, step = transformer()
    tree, steps = tree_of(again), []

    def counted() -> torch.Tensor:
        steps.append(1)
        return step()

    with simulated_accelerator() as sim:
        applied = fitted(again, counted, tmp_path)
        assert (profiled, steps) == ([1], [1])  # one step to see that everything is the same, and no planning
        assert applied.plan.recipes == first.plan.recipes
        assert applied.measured == first.measured
        assert applied.stored_at == str(file)
        assert all(p.grad is None for p in again.parameters())
        step()
        sim.reset_peak()
        step()
        assert sim.peak_bytes <= BUDGET
        again.zero_grad()
        got = gradients(again, step)
        applied.remove()
    assert_same(got, wanted)
    assert tree_of(again) == tree


def test_a_step_that_fits_is_not_measured_again(tmp_path: Path, profiled: list[int]) -> None:
    for _ in range(2):
        model, step = transformer()
        with simulated_accelerator():
            applied = fitted(model, step, tmp_path, "1GiB")
            assert applied.plan.does_nothing
            applied.remove()
    assert profiled == [1]


def _frozen() -> tuple[nn.Module, Callable[[], Any]]:
    model, step = transformer()
    model.embed.requires_grad_(False)
    return model, step


def _half() -> tuple[nn.Module, Callable[[], Any]]:
    torch.manual_seed(1)
    return with_batch(4, 32, Transformer().to(torch.bfloat16))


DIFFERENT: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    "another number of layers": lambda: transformer(5),
    "parameters that are not trained": _frozen,
    "another dtype": _half,
    "another batch": lambda: with_batch(3, 32),
    "as many tokens in another shape": lambda: with_batch(2, 64),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_step_is_planned_anew(what: str, tmp_path: Path, profiled: list[int]) -> None:
    with simulated_accelerator():
        fitted(*transformer(), tmp_path, "1GiB").remove()
        fitted(*DIFFERENT[what](), tmp_path, "1GiB").remove()
    assert profiled == [1, 1]
    assert len(list(tmp_path.iterdir())) == 2


def test_another_budget_device_setting_or_switch_is_planned_anew(
    tmp_path: Path, profiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(budget: int | str = "1GiB", capacity: str | None = None, **settings: Any) -> int:
        before = len(profiled)
        with simulated_accelerator(capacity_bytes=capacity, **settings):
            fitted(*transformer(), tmp_path, budget).remove()
        return len(profiled) - before

    assert [run(), run()] == [1, 0]
    assert [run("2GiB"), run("2GiB")] == [1, 0]
    assert [run(capacity="1TiB"), run(capacity="1TiB")] == [1, 0]
    assert [run(window_bytes=4096), run(window_bytes=4096)] == [1, 0]
    monkeypatch.setattr("hyper_parallel.backends.torch.planner.step_identity.__version__", "0.0.0")
    assert [run(), run()] == [1, 0]
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "1" if os.environ.get("HYPER_PARALLEL_NATIVE") == "0" else "0")
    assert run() == 1


def test_another_way_to_run_attention_is_planned_anew(tmp_path: Path, profiled: list[int]) -> None:
    """The modules and shapes are the same; only the ops differ."""
    for way in ("sdpa", "eager", "sdpa"):
        model, step = FAMILIES["llama"]()
        model.set_attn_implementation(way)
        with simulated_accelerator():
            fitted(model, step, tmp_path, "1GiB").remove()
    assert profiled == [1, 1]


def test_more_on_the_device_than_when_it_was_fitted_is_planned_anew(tmp_path: Path, profiled: list[int]) -> None:
    """A training that starts again from a checkpoint has its optimizer's states from the beginning."""
    model, step = transformer()
    with simulated_accelerator():
        fitted(model, step, tmp_path, ENOUGH).remove()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step()
        optimizer.step()
        model.zero_grad()
        applied = fitted(model, step, tmp_path, ENOUGH)
        applied.remove()
    assert profiled == [1, 1]
    assert applied.measured.peak_bytes <= ENOUGH


def test_a_share_with_a_little_more_memory_uses_the_plan_and_with_less_it_does_not(
    tmp_path: Path, profiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hyper_parallel.backends.torch.planner.meters import SimulatedMeter

    available, peaks = [2_000_000], []
    monkeypatch.setattr(SimulatedMeter, "capacity_bytes", lambda self: available[0])

    def run() -> int:
        before = len(profiled)
        with simulated_accelerator():
            applied = fitted(*transformer(), tmp_path, "90%")
            assert applied.measured.peak_bytes <= 0.9 * available[0]
            peaks.append(max(applied.measured.peak_bytes, applied.plan.predicted_peak_bytes))
            applied.remove()
        return len(profiled) - before

    assert run() == 1
    available[0] = 2_040_000
    assert run() == 0
    available[0] = 2_400_000
    assert run() == 1
    available[0] = int((peaks[0] - 1) / 0.9)
    assert run() == 1


@pytest.mark.parametrize("damage", ["cut", "foreign", "no JSON", "another plan"])
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning_and_replaced(
    damage: str, tmp_path: Path, profiled: list[int]
) -> None:
    model, step = transformer()
    with simulated_accelerator():
        first = fitted(model, step, tmp_path, ENOUGH)
        first.remove()
        (file,) = tmp_path.iterdir()
        whole = file.read_text()
        if damage == "another plan":
            first.plan.save(file)  # one that does not say what it was fitted to
        else:
            file.write_text({"cut": whole[: len(whole) // 2], "foreign": '{"schema": "x"}', "no JSON": "\0"}[damage])
        with pytest.warns(PlanWarning, match=r"plan-\w+\.json is ignored, and the plan is made anew") as caught:
            applied = fitted(model, step, tmp_path, ENOUGH)
        applied.remove()
        assert len(caught) == 1
        fitted(model, step, tmp_path, ENOUGH).remove()
    assert profiled == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_store_that_cannot_be_written_does_not_stop_a_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model, step = transformer()
    with simulated_accelerator(), pytest.warns(PlanWarning, match=r"the plan could not be kept in .*plans again"):
        fitted(model, step, tmp_path / "file" / "plans", ENOUGH).remove()


def test_what_is_no_store_is_refused_before_a_step_runs(tmp_path: Path) -> None:
    model, step = transformer()
    (tmp_path / "file").write_text("")
    with simulated_accelerator():
        with pytest.raises(ValueError, match=r"store '.*file' is a file; name a folder"):
            fitted(model, step, tmp_path / "file")
        for wrong in (3, "", b"x"):
            with pytest.raises(TypeError, match=r"store is a folder for plans, True .* or None"):
                hp.fit_memory(model, step, BUDGET, store=wrong)  # type: ignore[arg-type]
    assert float(model.forwards) == 0


@pytest.mark.parametrize(
    ("variable", "inside"), [("XDG_CACHE_HOME", "hyper_parallel/plans"), ("HYPER_PARALLEL_PLAN_STORE", ".")]
)
@pytest.mark.parametrize("store", [True, "default", None, False])
def test_the_default_store_is_in_the_users_cache_and_is_used_only_when_asked_for(
    store: bool | str | None, variable: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYPER_PARALLEL_PLAN_STORE", raising=False)
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")  # its builds are in the user's cache too
    monkeypatch.setenv(variable, str(tmp_path))
    with simulated_accelerator():
        hp.fit_memory(*transformer(), "1GiB", store=store, steps=1).remove()
    assert len(list((tmp_path / inside).glob("plan-*.json"))) == bool(store)


def test_a_profile_or_plan_of_the_user_is_used_and_the_store_is_not(tmp_path: Path) -> None:
    model, step = transformer()
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        fitted(model, step, tmp_path, ENOUGH, profile=profile).remove()
    assert not list(tmp_path.iterdir())
