"""A user's file is checked by ``mypy --strict``: the public functions say what they take and what they return."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.integrations import (
    accelerate,
    ddp,
    fsdp,
    lightning,
    peft,
    pipelining,
    transformers,
    treatment,
    trl,
)
from hyper_parallel.integrations.treatment import Treated
from hyper_parallel.planner.backend import AppliedPlan, AppliedRules

ROOT = Path(__file__).parents[2]

RIGHT = """
from typing import assert_type

import hyper_parallel as hp


class Layer:
    width = 3

    def __call__(self, x: int) -> float:
        return x / 2


def step() -> None: ...


layer = Layer()
assert_type(hp.checkpoint(layer, 1, policy_fn=["mm"], swap_inputs=True), float)
assert_type(hp.swap(layer, 1, swap_config=hp.SwapConfig(tail_bytes="512MiB", tiers=["pinned"])), float)
assert_type(hp.checkpoint_wrapper(layer, swap_inputs=True).width, int)
assert_type(hp.swap_wrapper(layer)(1), float)
assert_type(hp.swap_tensor_wrapper([1]), list[int])
config = hp.SwapConfig(tail_bytes="512MiB")
assert_type(config.tail_bytes, int | None)
with hp.configure(window_bytes="1GiB"):
    pass
profile = hp.profile_memory(layer, step)
plan = hp.plan_memory(profile, "20GiB")
assert_type(plan, hp.Plan)
with hp.apply_plan(layer, plan) as applied:
    assert_type(applied.plan, hp.Plan)
    applied.report("plan.txt")
fitted = hp.fit_memory(layer, step, "20GiB")
assert_type(fitted.plan.predicted_step_seconds, float)
fitted.remove()
rules = hp.apply_rules(layer, {"*::mm": "swap"})
assert_type(rules.decided()["*::mm"], int)
assert_type(rules.stats(), hp.SwapStats)
assert_type(fitted.stats(), hp.SwapStats)
assert_type(hp.stats().swapped_out_bytes, int)
"""

WRONG = {
    "a name that is not public": "hp.swop",
    "the keyword of a setting": "hp.SwapConfig(tail_byte=1)",
    "a setting that is no size": "hp.SwapConfig(tail_bytes=[1])",
    "a result that is taken for another": "hp.checkpoint(len, [1]).upper()",
    "a plan that is none": "hp.apply_plan(print, 3)",
    "a part that a plan has not": "hp.fit_memory(print, print, 1).plans",
}


HANDLES = (AppliedRules, AppliedPlan, Treated)
ADAPTERS = (accelerate, ddp, fsdp, lightning, peft, pipelining, transformers, treatment, trl)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and every public method of the public classes and of what the functions return."""
    named = {name: getattr(hp, name) for name in hp.__all__} | {kind.__name__: kind for kind in HANDLES}
    for module in ADAPTERS:
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__ if name != "Treated"}
    for name, value in named.items():
        if inspect.isclass(value):
            for member, function in inspect.getmembers(
                value, lambda it: inspect.isfunction(it) or inspect.ismethod(it)
            ):
                if not member.startswith("_") and function.__module__.startswith("hyper_parallel"):
                    yield f"{name}.{member}", function
        elif inspect.isfunction(value):
            yield name, value


def test_no_public_function_returns_any() -> None:
    functions = dict(public_functions())
    assert {"checkpoint", "SwapManager.stats", "Plan.load", "AppliedRules.decided"} <= set(functions)
    returns = {name: inspect.signature(function).return_annotation for name, function in functions.items()}
    assert [name for name, kind in returns.items() if kind in ("Any", inspect.Signature.empty)] == []


def test_stats_mean_one_thing_in_one_shape() -> None:
    of_stats = {name: function for name, function in public_functions() if name.rpartition(".")[2] == "stats"}
    expected = {"stats", *(f"{kind.__name__}.stats" for kind in (hp.SwapManager, *HANDLES))}
    assert expected <= set(of_stats)
    # A special kind of handle inherits it.
    assert set(of_stats.values()) == {of_stats[name] for name in expected}
    assert {inspect.signature(function).return_annotation for function in of_stats.values()} == {"SwapStats"}


def checked(tmp_path: Path, text: str) -> tuple[int, str]:
    """mypy's exit status and words for a file of a user."""
    (tmp_path / "user.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--follow-imports", "silent"),
            *("--cache-dir", str(ROOT / ".mypy_cache" / "user"), str(tmp_path / "user.py")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every mistake in one file, one on each line, because mypy takes its time."""
    lines = ["import hyper_parallel as hp", *WRONG.values()]
    code, words = checked(tmp_path_factory.mktemp("wrong"), "\n".join(lines) + "\n")
    assert code == 1, words
    return words


def test_a_file_that_uses_every_public_function_is_right(tmp_path: Path) -> None:
    code, words = checked(tmp_path, RIGHT)
    assert code == 0, words


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_seen(verdict: str, mistake: str) -> None:
    assert f"user.py:{list(WRONG).index(mistake) + 2}: error" in verdict
