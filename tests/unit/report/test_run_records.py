"""Run records: saved and loaded as they were, and refused when they are not ours."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.records.run_record import FateTotal, MemoryCurve, OpTotal, RunRecord, StepRecord
from hyper_parallel.records.work_span import Track, WorkSpan
from tests.unit.report.runs import MIB, hostile_run, planned_step, small_run, small_step


@pytest.mark.parametrize("run", [small_run(), hostile_run()], ids=["plain", "hostile"])
def test_a_run_comes_back_as_it_was(run: RunRecord, tmp_path: Path) -> None:
    run.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json") == run
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == "hyper_parallel.run/2"


def test_a_step_comes_back_as_it_was(tmp_path: Path) -> None:
    small_step().save(tmp_path / "step.json")
    assert StepRecord.load(tmp_path / "step.json") == small_step()


def change(path: Path, edit: Any) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda data: data.update(schema="hyper_parallel.run/9"),
            r"schema is 'hyper_parallel.run/9', this version reads",
        ),
        (lambda data: data.update(surprise=1), r"unknown surprise; known are title"),
        (lambda data: data.pop("versions"), r"missing versions"),
        (lambda data: data["steps"][0].update(peak_bytes="much"), r"steps\[0\].peak_bytes: expected int, got 'much'"),
        (lambda data: data["steps"][0].update(peak_bytes=-1), r"a peak of -1 bytes is negative"),
        (lambda data: data["steps"][0]["memory"]["nbytes"].pop(), r"3 times and 2 values"),
        (lambda data: data["steps"][0]["memory"]["times_us"].reverse(), r"times_us: does not rise"),
        (lambda data: data["steps"][0]["spans"][0].update(track="sideways"), r"expected one of forward, replay"),
        (lambda data: data.update(steps=[]), r"RunRecord.steps: 0; 1 to 64 are read"),
        (lambda data: data.update(steps=[data["steps"][0]] * 2), r"names must differ, got none, none"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(edit: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    small_run().save(path)
    change(path, edit)
    with pytest.raises(PlanError, match=words):
        RunRecord.load(path)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(PlanError, match=r"is not a RunRecord that can be read.*Write it again with RunRecord.save"):
        RunRecord.load(tmp_path / "run.json")


def test_a_span_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match=r"WorkSpan 'a': ends at 1.0, before 2.0"):
        WorkSpan(track=Track.FORWARD, name="a", start_us=2.0, end_us=1.0)
    with pytest.raises(ValueError, match=r"MemoryCurve.nbytes: has a negative value"):
        MemoryCurve(times_us=(0.0,), nbytes=(-1,))
    with pytest.raises(ValueError, match=r"OpTotal mm.saved_bytes: -1 is negative"):
        OpTotal(op="mm", count=1, saved_bytes=-1)


def test_gradients_are_equal_different_or_were_not_compared() -> None:
    run = small_run(
        steps=(small_step("a"), small_step("b"), small_step("c", gradients="x"), small_step("d", gradients=""))
    )
    assert [run.are_gradients_equal(step) for step in run.steps] == [True, True, False, None]


def test_the_models_own_peak_is_the_peak_without_the_process() -> None:
    assert small_step().model_peak_bytes == small_step().peak_bytes - 300 * 2**20


DATA = Path(__file__).parent / "data"


def test_files_of_schema_1_are_read_with_their_fates_and_prediction() -> None:
    run, step = RunRecord.load(DATA / "run_schema_1.json"), StepRecord.load(DATA / "step_schema_1.json")
    assert run.steps[-1] == step
    assert step.fates == (
        FateTotal(fate=Fate.SWAP, nbytes=100 * MIB),
        FateTotal(fate=Fate.SAVE, nbytes=7 * MIB),  # was "saved" because of "policy"
        FateTotal(fate=Fate.RECOMPUTE, nbytes=60 * MIB),
        FateTotal(fate=Fate.SAVE, reason="policy", nbytes=2 * MIB),  # was "kept"
        FateTotal(fate=Fate.SAVE, reason="below_min_bytes", nbytes=3 * MIB),
    )
    assert step.predicted == planned_step().predicted
    assert run.budget_bytes == 100 * MIB


def test_a_file_of_schema_1_is_written_again_with_schema_2(tmp_path: Path) -> None:
    run = RunRecord.load(DATA / "run_schema_1.json")
    run.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == "hyper_parallel.run/2"
    assert RunRecord.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("field", ["steps", "fates", "fate", "forecast"])
@pytest.mark.parametrize("value", [3, "x", [3], {"x": 3}, [[]]])
def test_a_malformed_file_of_schema_1_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    data = json.loads((DATA / "run_schema_1.json").read_text())
    holder = {
        "steps": data,
        "fates": data["steps"][1],
        "fate": data["steps"][1]["fates"][0],
        "forecast": data["steps"][1],
    }
    holder[field][field] = value
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"is not a RunRecord that can be read"):
        RunRecord.load(tmp_path / "run.json")


def test_a_link_stays_a_link_and_what_is_no_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "run.json")
    small_run().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert RunRecord.load(tmp_path / "run.json") == small_run()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    small_run().save(pipe)
    reader.join(timeout=600)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert read == [(tmp_path / "run.json").read_text()]
