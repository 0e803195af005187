"""The benchmarks that need a GPU run all of their code on the simulated accelerator. No time is compared."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def lines_of(
    script: str, file: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str
) -> list[dict[str, object]]:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module(f"benchmarks.{script}")
    monkeypatch.setattr(sys, "argv", [script, "--simulated", "--output", str(folder), *options])
    module.main()
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def test_ways_that_swap_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = {row["mode"]: row for row in lines_of("swap_h200", "swap.jsonl", monkeypatch, tmp_path)}
    assert "cannot be had here" in str(rows.pop("TRL, 4 MiB").get("error"))
    assert set(rows) == {
        "none",
        "torch checkpoint",
        "torch selective",
        "attention swapped, rest recomputed",
        "attention and matmuls swapped",
        "swap_wrapper, 4 MiB",
    }
    assert {row["rounds"] for row in rows.values()} == {2}


def test_budgets_are_fitted_and_measured_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = {row["mode"]: row for row in lines_of("budgets_h200", "budgets.jsonl", monkeypatch, tmp_path)}
    assert {"none", "torch checkpoint", "torch selective", "fit 1.0", "fit 1.5"} <= set(rows)
    assert all(rows[way]["peak_over_budget"] <= 1.02 for way in ("fit 1.0", "fit 1.5"))
