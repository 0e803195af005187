"""The soak's slice of every check, and that its judge can fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.backends.torch import native

_ROOT = Path(__file__).resolve().parents[2]
_STEPS = 240


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command puts its own in front
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    spec = importlib.util.spec_from_file_location("soak_command", _ROOT / "scripts" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak_command", module)
    spec.loader.exec_module(module)
    return module


def test_a_short_run_is_flat_and_says_what_it_did(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, str(_ROOT / "scripts" / "soak.py"), "--steps", str(_STEPS), "--sample-every", "20"]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(output.read_text())
    assert record["problems"] == []
    assert (record["steps"], record["errors_survived"], len(record["samples"])) == (_STEPS, 2, 12)
    assert record["steps_compared_bitwise"] >= 10
    if native.load() is not None:
        assert record["regions_from_tape"] >= 3 * _STEPS, record["regions_from_python"]


def _flat(soak: Any) -> list[Any]:
    return [
        soak.Sample(
            step=number,
            device_bytes=0,
            live_records=0,
            lent_bytes=0,
            far_bytes=4096,
            resident_bytes=10**8,
            descriptors=9,
            threads=1,
            objects=10**5,
            live_tapes=0,
        )
        for number in range(30)
    ]


def test_flat_samples_are_flat(soak: Any) -> None:
    assert soak.growth(_flat(soak)) == []


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("descriptors", 1),
        ("threads", 1),
        ("objects", 2500),
        ("far_bytes", 2**21),
        ("resident_bytes", 2**26),
        ("lent_bytes", 1),
        ("live_records", 1),
        ("device_bytes", 1),
        ("live_tapes", 1),
    ],
)
def test_growth_is_seen(soak: Any, name: str, by: int) -> None:
    samples = _flat(soak)
    samples[-1] = dataclasses.replace(samples[-1], **{name: getattr(samples[-1], name) + by})
    (problem,) = soak.growth(samples)
    assert name.split("_")[-1] in problem
