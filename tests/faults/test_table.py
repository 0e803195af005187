"""Every cell of the fault table: a clear error or a right step, nothing left behind, the next step right."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import bench, inject
from faults.bench import Bench, trial
from faults.table import CELLS, FAULTS, ROWS, Cell


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "HYPER_PARALLEL_PLATFORM", "torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


EXPERIMENTS = {key: cell for key, cell in CELLS.items() if isinstance(cell, Cell)}


def _params() -> list[Any]:
    """Moments are drawn by the clock, not by the seed: the long tier tries them, and the command that writes the table."""
    marks = {True: [pytest.mark.long], False: []}
    return [
        pytest.param(row, fault, id=f"{row} - {fault}", marks=marks[cell.row.kind == "moment"])
        for (row, fault), cell in EXPERIMENTS.items()
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("row", "fault"), _params())
def test_a_fault(row: str, fault: str, tmp_path: Path) -> None:
    cell = EXPERIMENTS[row, fault]
    outcomes = cell.run(tmp_path)
    assert outcomes
    assert set(outcomes) <= cell.allowed, f"{dict(outcomes)}, allowed is {sorted(cell.allowed)}"


def test_no_cell_is_empty() -> None:
    assert set(CELLS) == {(row.name, fault) for row in ROWS for fault in FAULTS}
    assert all(isinstance(cell, Cell) or (isinstance(cell, str) and len(cell) > 10) for cell in CELLS.values())
    for row in ROWS:
        assert any(isinstance(CELLS[row.name, fault], Cell) for fault in FAULTS), f"{row.name} has no experiment"
    for fault in FAULTS:
        assert any(isinstance(CELLS[row.name, fault], Cell) for row in ROWS), f"{fault} has no experiment"


class TestTheJudge:
    """A trial notices what it is there to notice."""

    BENCH = Bench(name="pinned")

    def test_a_wrong_step(self, tmp_path: Path) -> None:
        def wrong(real: Any, args: Any, kwargs: Any) -> Any:
            return real(*args, **kwargs) * 2

        with pytest.raises(AssertionError, match="the step with the fault in it is wrong"):
            trial(self.BENCH, tmp_path, lambda: inject.OpSite().replaced(5, wrong))

    def test_a_leak(self, tmp_path: Path) -> None:
        held: list[Any] = []

        def holding(real: Any, args: Any, kwargs: Any) -> Any:
            held.append(real(*args, **kwargs))
            return held[-1]

        with pytest.raises(AssertionError, match="device bytes are left"):
            trial(self.BENCH, tmp_path, lambda: inject.OpSite().replaced(5, holding))

    def test_an_open_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bench, "ENDS_WITHIN_S", 0.1)  # this file stays open, however long one waits
        held: list[Any] = []

        def opening(real: Any, args: Any, kwargs: Any) -> Any:
            held.append((tmp_path.parent / "open").open("w"))
            return real(*args, **kwargs)

        with pytest.raises(AssertionError, match="left open"):
            trial(self.BENCH, tmp_path, lambda: inject.OpSite().replaced(5, opening))
        held[0].close()

    def test_a_signal_is_a_real_one(self) -> None:
        handlers = inject.Handlers()
        act = inject.signalled(signal.SIGTERM, is_after=False)
        with pytest.raises(inject.Stopped, match="143"), handlers.installed():
            act(lambda: None, (), {})
