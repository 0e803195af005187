"""The benchmark of compiled blocks runs to its end at a tiny size."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_every_way_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "benchmarks", raising=False)
    importlib.import_module("benchmarks.compile_h200").main(["--simulated"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    measured = {line["mode"] for line in lines if line.get("rounds") == 2}
    assert {
        "none",
        "eager",
        "torch around",
        "torch inside",
        "torch inside, attention",
        "torch inside, matmuls",
    } <= measured
    assert any(mode.startswith("fit ") for mode in measured)
    assert {"compile, none", "compilations"} <= {line["mode"] for line in lines}
    assert lines[-1] == {**lines[-1], "mode": "graph breaks", "breaks": {}}
