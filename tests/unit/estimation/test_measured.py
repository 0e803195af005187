"""Estimates against measured steps: within 10 % of the memory and 15 % of the time, but for the misses that are named."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import estimate as comparison
from hyper_parallel.estimation.cards import SHARES
from hyper_parallel.estimation.estimate import ERRORS

ROWS = comparison.compared()
CASES = json.loads(comparison.MEASURED.read_text())["cases"]
MODES = {"plain": "none", "recompute": "torch checkpoint", "inputs": "ours inputs"}
FRONTIER_NAMES = {
    "stack-8k": "stack-8k",
    "stack-32k": "stack-32k",
    "Llama, 8k": "llama-8k",
    "Llama, 32k": "llama-32k",
    "Mixtral shape, 4k": "moe-4k",
    "launch-bound stack of the frontier, 2k": "stack-small",
}


def identity(row: comparison.Comparison) -> str:
    return f"{row.case}, {row.way} @{row.estimated_gib:.1f}"


def test_the_constants_are_the_fit_to_one_case() -> None:
    assert [case["name"] for case in CASES if case["role"] == "fit"] == ["stack-8k"]
    fitted = dataclasses.asdict(comparison.fit())
    assert dataclasses.asdict(SHARES) == pytest.approx(fitted, abs=0.0006)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.miss], ids=identity)
def test_a_measured_step_is_estimated_within_the_bars(row: comparison.Comparison) -> None:
    assert row.memory_error is None or abs(row.memory_error) <= 0.10
    assert abs(row.time_error) <= 0.15
    assert abs(row.ratio_error) <= 0.15


@pytest.mark.parametrize("row", [row for row in ROWS if row.miss], ids=identity)
def test_a_named_miss_is_one(row: comparison.Comparison) -> None:
    assert not row.is_within_bars, "it is within the bars now: take the reason out of the data"


@pytest.mark.parametrize("row", ROWS, ids=identity)
def test_the_error_is_no_larger_than_the_command_says(row: comparison.Comparison) -> None:
    applying = [ERRORS[kind] for kind in row.kinds]
    assert abs(row.memory_error or 0.0) <= max(errors.memory for errors in applying)
    assert abs(row.time_error) <= max(errors.seconds for errors in applying)
    assert abs(row.ratio_error) <= max(errors.ratio for errors in applying)


def test_the_cases_that_must_be_compared_are_there() -> None:
    tested = {case["name"] for case in CASES if case["role"] == "test"}
    required = {"stack-32k", "GQA stack, 16k", "Llama-3, 8k", "8B LoRA, 4k", "Qwen3-MoE, 4k", "Llama-3 with Liger, 8k"}
    assert required | {"compiled stack, 8k", "launch-bound stack, 2k"} <= tested


def test_numbers_of_the_frontier_are_those_of_its_file() -> None:
    results = {one["case"]["name"]: one["modes"] for one in json.loads(comparison.FRONTIER.read_text())["results"]}
    compared = 0
    for case in CASES:
        if case["name"] not in FRONTIER_NAMES:
            continue
        modes = results[FRONTIER_NAMES[case["name"]]]
        assert case["plain_ms"] == pytest.approx(modes["none"]["ms_median"], abs=0.06)
        for row in case["rows"]:
            if row["way"] == "plan":
                near = [
                    mode
                    for name, mode in modes.items()
                    if name.startswith("ours") and abs(mode["act_gib"] - row["activations_gib"]) < 0.01
                ]
                mode = near[0]
            else:
                mode = modes[MODES[row["way"]]]
            assert row["ratio"] == pytest.approx(mode["ratio"], abs=0.0006)
            assert row["activations_gib"] == pytest.approx(mode["act_gib"], abs=0.006)
            compared += 1
    assert compared >= 20


def test_the_page_is_what_the_script_writes() -> None:
    page = comparison.ROOT / "benchmarks" / "results" / "estimate_202611.md"
    assert page.read_text(encoding="utf-8") == comparison.page(ROWS, SHARES)
