"""The doctor's findings: what works on which machine, and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel._version import TESTED_TORCH
from hyper_parallel.backends.machine import Accelerator, DiskSpeed, disk_speed
from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.planner.links import LinkProbe, rates_of_devices
from hyper_parallel.cli import doctor
from hyper_parallel.cli.command_line import main
from hyper_parallel.cli.doctor import Machine, examined, findings
from hyper_parallel.planner.shared_link import Rates

GIB = 2**30
DISK = DiskSpeed(
    write_bytes_per_second=2.0 * GIB, read_bytes_per_second=3.0 * GIB, free_bytes=100 * GIB, is_direct=True
)
GPU = Accelerator(
    name="a gpu",
    memory_bytes=80 * GIB,
    free_bytes=79 * GIB,
    out_bytes_per_second=50.0 * GIB,
    in_bytes_per_second=52.0 * GIB,
    copy_seconds=1e-5,
    pin_seconds_per_byte=3e-10,
)
HOST = Machine(
    python="3.11.7",
    packages={"torch": "2.13.0"},
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    host_limit_bytes=30 * GIB,
    cores=2,
    disk_path="/fast",
    disk=DISK,
    recorder="there",
)


def verdicts(machine: Machine) -> dict[str, str]:
    return {finding.what: finding.works for finding in findings(machine)}


def test_without_an_accelerator_the_disk_is_what_there_is() -> None:
    found = verdicts(HOST)
    assert found == {
        "recompute": "yes",
        "recompute from a tape": "yes",
        "swap to pinned memory": "no",
        "swap to disk": "yes",
        "planning a budget": "no",
    }
    assert any("disk_path='/fast'" in finding.because for finding in findings(HOST))


def test_with_an_accelerator_everything_works() -> None:
    assert set(verdicts(dataclasses.replace(HOST, accelerators=(GPU,))).values()) == {"yes"}


def test_a_slow_disk_a_full_machine_and_bad_settings_are_named() -> None:
    slow = dataclasses.replace(DISK, write_bytes_per_second=100.0 * 2**20)
    machine = dataclasses.replace(
        HOST, disk=slow, available_bytes=10 * GIB, settings_problem="HYPER_PARALLEL_MIN_BYTES: cannot read 'x'"
    )
    found = verdicts(machine)
    assert found["swap to disk"] == "slowly"
    assert found["large far memory in RAM"] == "slowly"
    assert found["settings in the environment"] == "no"


def test_a_torch_release_that_is_not_tested_is_named() -> None:
    def of(version: str) -> str | None:
        return verdicts(dataclasses.replace(HOST, packages={"torch": version})).get("this torch release")

    assert {of(f"{release}.0+cpu") for release in TESTED_TORCH} == {None}
    assert (of("2.7.1"), of("2.14.0"), of("3.0.0a1")) == ("no", "untested", "untested")


def test_two_frameworks_need_a_choice() -> None:
    both = dataclasses.replace(HOST, packages={"torch": "2.13.0", "mindspore": "2.10.0"})
    assert verdicts(both)["choosing a framework"] == "no"
    assert "choosing a framework" not in verdicts(dataclasses.replace(both, chosen_platform="torch"))


def test_without_torch_only_that_is_said() -> None:
    (first, *rest) = findings(dataclasses.replace(HOST, torch_problem="ImportError: no torch"))
    assert (first.what, first.works) == ("PyTorch", "no")
    assert rest == []


ALONE = dataclasses.replace(
    HOST, packages={"mindspore": "2.10.0", "numpy": "1.26.4"}, torch_problem="no torch", recorder=""
)


def test_mindspore_alone_is_a_machine_that_works() -> None:
    assert verdicts(ALONE) == {
        "recompute": "yes",
        "swap to pinned memory": "no",
        "swap to disk": "yes",
        "planning a budget": "no",
        "graph mode and jit": "no",
        "MindSpore": "yes",
    }
    assert not any("torch" in finding.because for finding in findings(ALONE))


def test_a_torch_that_is_broken_is_said_beside_mindspore() -> None:
    broken = dataclasses.replace(ALONE, packages={**ALONE.packages, "torch": "2.13.0"}, torch_problem="libfoo.so")
    assert verdicts(broken)["PyTorch"] == "no"
    assert verdicts(broken)["graph mode and jit"] == "no"
    assert "libfoo.so" in findings(broken)[0].because


def test_a_mindspore_that_is_broken_is_said() -> None:
    broken = dataclasses.replace(ALONE, mindspore_problem="ImportError: libfoo.so")
    assert verdicts(broken) == {"PyTorch": "no", "MindSpore": "no"}
    assert doctor._usable(broken) == []
    assert doctor._usable(ALONE) == ["mindspore"]


def test_numpy_2_beside_mindspore_is_named() -> None:
    machine = dataclasses.replace(ALONE, packages={"mindspore": "2.10.0", "numpy": "2.1.0"})
    (found,) = [finding for finding in findings(machine) if finding.what == "MindSpore"]
    assert found.works == "no"
    assert "pip install 'numpy<2'" in found.because


def test_an_ascend_is_untested_and_its_memory_is_not_known() -> None:
    machine = dataclasses.replace(ALONE, accelerators=(Accelerator(name="Ascend"),))
    assert verdicts(machine)["planning a budget"] == verdicts(machine)["swap to pinned memory"] == "untested"
    assert ["device 0", "Ascend; its memory and its links are not measured"] in doctor._machine_rows(machine)


def test_the_framework_that_is_chosen_is_the_one_that_is_spoken_of() -> None:
    both = dataclasses.replace(HOST, packages={"torch": "2.13.0", "mindspore": "2.10.0"})
    assert "graph mode and jit" not in verdicts(both)
    assert "graph mode and jit" in verdicts(dataclasses.replace(both, chosen_platform="mindspore"))
    assert "recompute from a tape" in verdicts(dataclasses.replace(both, chosen_platform="torch"))


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({}, 0),
        ({"chosen_platform": "torch"}, 0),
        ({"chosen_platform": "jax"}, 1),
        ({"chosen_platform": "mindspore"}, 1),
        ({"torch_problem": "no torch"}, 1),
        ({"torch_problem": "no torch", "packages": {"mindspore": "2.10.0"}}, 0),
        ({"torch_problem": "no torch", "packages": {"mindspore": "2.10.0"}, "chosen_platform": "torch"}, 1),
    ],
)
def test_the_exit_code_says_whether_a_framework_can_be_used(
    facts: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examined", lambda *_: dataclasses.replace(HOST, **facts))
    assert main(["doctor"]) == code
    assert "What works here" in capsys.readouterr().out


def test_a_disk_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    machine = examined(str(tmp_path / "nowhere"))
    assert machine.disk is None
    assert "cannot write to" in machine.disk_problem
    assert verdicts(machine)["swap to disk"] == "no"


def test_the_probe_leaves_no_file(tmp_path: Path) -> None:
    speed = disk_speed(tmp_path, nbytes=8 * 2**20)
    assert speed.write_bytes_per_second > 0
    assert speed.read_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_measures_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_MIN_BYTES", "a few")
    assert main(["doctor", "--disk-path", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["machine"]["packages"]["torch"].startswith("2.")
    assert said["machine"]["available_bytes"] <= said["machine"]["memory_bytes"]
    assert {"what": "settings in the environment", "works": "no"}.items() <= said["findings"][-1].items()


def test_a_tape_is_named_with_the_reason_why_there_is_none() -> None:
    assert verdicts(HOST)["recompute from a tape"] == "yes"
    without = dataclasses.replace(HOST, recorder="missing", recorder_problem="there is no C++ compiler (install g++)")
    (found,) = [finding for finding in findings(without) if finding.what == "recompute from a tape"]
    assert found.works == "no"
    assert found.because == (
        "regions run Python again, because the native recorder is missing: there is no C++ compiler (install g++)"
    )


def doctors_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> Any:
    assert main(["doctor", "--disk-path", str(tmp_path), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_command_says_whether_the_recorder_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = doctors_answer(tmp_path, capsys)
    (found,) = [finding for finding in said["findings"] if finding["what"] == "recompute from a tape"]
    recorder, problem = said["machine"]["recorder"], said["machine"]["recorder_problem"]
    if native.load() is None:
        assert (recorder, found["works"]) == ("missing" if native.is_wanted() else "switched off", "no")
        assert problem == native.why_not()
        assert problem in found["because"]
    else:
        assert (recorder, problem, found["works"]) == ("there", "", "yes")


def test_a_recorder_that_is_switched_off_is_told_from_one_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    said = doctors_answer(tmp_path, capsys)["machine"]
    assert said["recorder"] == "switched off"
    assert "HYPER_PARALLEL_NATIVE" in said["recorder_problem"]
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "1")
    monkeypatch.setattr(native, "_loaded", lambda: (None, "there is no C++ compiler"))
    said = doctors_answer(tmp_path, capsys)["machine"]
    assert (said["recorder"], said["recorder_problem"]) == ("missing", "there is no C++ compiler")


def test_a_build_of_the_recorder_is_announced_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def build() -> tuple[None, str]:
        seen.append(capsys.readouterr().err)
        return None, "the test builds nothing"

    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "1")
    monkeypatch.setattr(native, "_loaded", build)
    assert main(["doctor", "--disk-path", str(tmp_path)]) == 0
    assert "where there is none it is built: about a minute" in seen[0]


def test_on_mindspore_nothing_is_said_of_a_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    code = 0 if importlib.util.find_spec("mindspore") else 1
    assert main(["doctor", "--disk-path", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert "recorder" not in said.out + said.err
    assert "tape" not in said.out
    machine = doctors_answer(tmp_path, capsys, code=code)["machine"]
    assert (machine["recorder"], machine["recorder_problem"]) == ("", "")


def rows(machine: Machine) -> dict[str, str]:
    return {what.strip(): value for what, value in doctor._machine_rows(machine)}


def test_the_ranks_that_are_assumed_are_said_and_how_to_measure_with_more() -> None:
    said = rows(dataclasses.replace(HOST, accelerators=(GPU,) * 4))
    assert said["ranks on this host"] == (
        "1 is assumed; torchrun --nproc-per-node 4 -m hyper_parallel.cli doctor measures with 4"
    )
    assert said["far memory by default"] == "30.00 GiB of RAM for each rank"
    assert rows(dataclasses.replace(HOST, local_ranks=8))["ranks on this host"] == "8, as the launcher says"


def test_a_link_is_shown_alone_and_with_all_copying() -> None:
    shared = dataclasses.replace(GPU, shared_out_bytes_per_second=25.0 * GIB, shared_in_bytes_per_second=26.0 * GIB)
    said = rows(dataclasses.replace(HOST, accelerators=(shared, shared)))
    assert said["link out / back"] == "50.00 GiB/s / 52.00 GiB/s"
    assert said["with 2 devices copying"] == "25.00 GiB/s / 26.00 GiB/s"
    rates = Rates(ranks=4, lone_out=40.0 * GIB, lone_in=30.0 * GIB, shared_out=10.0 * GIB, shared_in=9.0 * GIB)
    said = rows(dataclasses.replace(HOST, local_ranks=4, shared_link=rates))
    assert said["RAM to RAM out / back, one rank"] == "40.00 GiB/s / 30.00 GiB/s"
    assert said["with 4 ranks copying"] == "10.00 GiB/s / 9.00 GiB/s for each"


class QueuedDevice:
    """A device whose copies are done only once all that were queued are: those of all devices share one link."""

    queued = 0

    def allocate(self, nbytes: int) -> int:
        return nbytes

    def allocate_host(self, nbytes: int, *, pinned: bool) -> int:
        assert pinned
        return nbytes

    def new_stream(self) -> str:
        return "stream"

    def record_event(self, stream: str, *, timing: bool) -> str:
        return stream

    def copy(self, destination: int, source: int, stream: str) -> None:
        QueuedDevice.queued += source

    def synchronize_event(self, event: str) -> None:
        """Nothing is left to wait for."""

    def elapsed_us(self, start: str, end: str) -> float:
        return QueuedDevice.queued  # a byte in a microsecond


def test_devices_of_one_process_copy_at_once() -> None:
    QueuedDevice.queued = 0
    probes = [LinkProbe(QueuedDevice(), None) for _ in range(4)]  # type: ignore[arg-type]
    assert rates_of_devices(probes, goes_out=True) == [pytest.approx(1e6 / 4)] * 4
