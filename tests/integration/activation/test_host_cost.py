"""The benchmark of the host's cost runs, and every tensor of its step goes out and comes back. No time is compared."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hyper_parallel as hp

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def host_cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.host_cost")


def test_every_tensor_of_the_step_goes_out_and_comes_back(host_cost: ModuleType) -> None:
    with host_cost.no_op_device() as device:
        host_cost._Step(40, 64, "cpu", device.begin_step).run(swaps=True)
        stats = hp.SwapManager().stats()
        assert stats.swapped_out_bytes == 40 * 64
        assert stats.swapped_in_bytes == 40 * 64
        assert (stats.misses, stats.live_records) == (1, 0)


def test_the_benchmark_writes_a_table_and_its_numbers(
    host_cost: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "host_cost")
    sizes = ["--tensors", "2", "--tensors", "20", "--rounds", "1", "--nbytes", "64"]
    devices = ["--device", "no-op", "--device", "simulated"]
    monkeypatch.setattr(sys, "argv", ["host_cost", *devices, *sizes, "--output", output])
    host_cost.main()
    assert "| no-op | 20 |" in capsys.readouterr().out
    costs = json.loads(Path(output + ".json").read_text())["costs"]
    assert [(cost["device"], cost["tensors"]) for cost in costs] == [
        ("no-op", 2), ("no-op", 20), ("simulated", 2), ("simulated", 20)
    ]  # fmt: skip
    assert all(cost["calls"]["core/activation_checkpoint/engine"] > 1 for cost in costs)
    assert costs[1]["device_calls"]["copy"] > 1
    assert "Host cost of a swapped tensor" in Path(output + ".md").read_text()
