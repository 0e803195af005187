"""Gradients beside torch's own parallelism are bitwise those of the same run without the engine."""

from __future__ import annotations

import functools

import pytest

from .launch import PASSED, check_names, run_checks

MODULES = ("checks_data_parallel", "checks_model_parallel", "checks_compiled")


@functools.cache
def _verdicts(module: str, names: tuple[str, ...]) -> dict[str, str]:
    """One launch for all; what a failure left undone gets a launch of its own."""
    verdicts: dict[str, str] = {}
    while left := [name for name in names if name not in verdicts]:
        verdicts |= run_checks(module, left)
    return verdicts


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in check_names(module)])
def test_on_two_ranks(module: str, name: str, request: pytest.FixtureRequest) -> None:
    # One launch for all checks of the module that were asked for on the command line.
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "function", None) is test_on_two_ranks and item.callspec.params["module"] == module  # type: ignore[attr-defined]
    ]
    verdict = _verdicts(module, tuple(asked))[name]
    if verdict != PASSED:
        pytest.fail(verdict, pytrace=False)
