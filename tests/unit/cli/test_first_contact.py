"""What somebody meets who types a command for the first time: near misses, signals, narrow screens, missing extras."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.cli import doctor
from hyper_parallel.cli.command_line import build_parser, main
from hyper_parallel.cli.completion import choices_of, options_of, script_for
from hyper_parallel.cli.console import Console
from hyper_parallel.cli.doctor import Machine, findings
from hyper_parallel.errors import MissingPackageError
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.report import bitmap
from tests.unit.planner_core.small import small_profile
from tests.unit.report.runs import small_run

CPU_MODEL = """
import torch
def make():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    return model, lambda: model(torch.randn(2, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["dmeo"], "demo"),
        (["repotr", "run.json"], "report"),
        (["plan", "a:b", "--buget", "1GiB", "--budget", "1"], "--budget"),
        (["plan", "a:b", "--buget=1GiB"], "--budget"),  # argparse complains that --budget is missing
        (["demo", "--size", "tny"], "tiny"),
        (["completion", "bsh"], "bash"),
    ],
)
def test_a_mistyped_command_or_option_is_answered_with_what_was_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert f"did you mean {meant}" in capsys.readouterr().err


def test_the_values_of_an_option_are_completed() -> None:
    parser = build_parser()
    script = script_for("bash", options_of(parser), choices_of(parser))
    asked = "COMP_WORDS=(hyper-parallel demo --size t); COMP_CWORD=3; _hyper_parallel; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tiny"]


def test_a_report_without_the_extra_writes_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise MissingPackageError("figure: cannot draw a PNG without the package 'resvg_py'")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bitmap, "_drawing", missing)
    small_run().save("run.json")
    code = main(["report", "run.json", "--svg", "f.svg", "--png", "f.png", "--trace", "t.json"])
    said = capsys.readouterr()
    assert code == 1
    assert all(Path(name).exists() for name in ("report.html", "f.svg", "t.json"))
    assert "written: report.html, f.svg, t.json" in said.out
    assert "f.png was not written: figure: cannot draw a PNG without the package" in said.err


def machine(**facts: object) -> Machine:
    given = {"python": "3.12", "packages": {"torch": "2.13.0"}, "memory_bytes": 8, "available_bytes": 8, **facts}
    return Machine(host_limit_bytes=4, cores=2, disk_path="/tmp", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("jax", "HYPER_PARALLEL_PLATFORM=jax names no framework"),
        ("mindspore", "mindspore is not installed: pip install"),
    ],
)
def test_doctor_says_when_the_chosen_framework_cannot_be(chosen: str, words: str) -> None:
    found = [one for one in findings(machine(chosen_platform=chosen)) if one.what == "choosing a framework"]
    assert [one.works for one in found] == ["no"]
    assert words in found[0].because


def test_doctor_says_when_this_torch_was_never_tested() -> None:
    found = [one for one in findings(machine(packages={"torch": "2.99.0"})) if one.what == "this torch release"]
    assert [one.works for one in found] == ["untested"]


def test_no_message_suggests_a_command_that_needs_a_package_index_to_know_us() -> None:
    source = Path(sys.modules["hyper_parallel"].__file__ or "").parent
    wrong = [path for path in source.rglob("*.py") if re.search(r"pip install '?hyper-parallel", path.read_text())]
    assert wrong == []


def test_a_mistyped_way_or_factory_is_answered_with_what_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cpu_model", raising=False)
    (tmp_path / "cpu_model.py").write_text(CPU_MODEL)
    assert main(["bench", "cpu_model:make", "--simulate", "--ways", "none,recomput"]) == 2
    assert "there is no way 'recomput'; did you mean recompute?" in capsys.readouterr().err
    assert main(["bench", "cpu_model:mke", "--simulate"]) == 1
    assert "cpu_model has no function 'mke'; did you mean make? it has make" in capsys.readouterr().err


def test_a_demo_without_torch_leaves_no_folder(tmp_path: Path) -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom hyper_parallel.cli import main\nsys.exit(main(['demo']))\n"
    source = str(Path(sys.modules["hyper_parallel"].__file__ or "").parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "pip install torch" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_that_a_package_answers_with_another_error_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("an import that was interrupted") from None
        return 0

    monkeypatch.setattr(doctor, "run", run)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["doctor"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "hyper-parallel doctor: interrupted\n"


def test_a_model_on_the_cpu_is_answered_with_the_option_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cpu_model", raising=False)
    (tmp_path / "cpu_model.py").write_text(CPU_MODEL)
    assert main(["plan", "cpu_model:make", "--budget", "1MiB"]) == 1
    assert "the model is on the CPU, where there is no device memory to plan; add --simulate" in capsys.readouterr().err


def test_a_plan_is_answered_shortly_and_explained_at_length_sorted_by_one_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    profile = small_profile()
    profile.save("p.json")
    budget = plan_memory(profile, 10**6, effort=0.2).untouched.peak_bytes - 10
    plan = plan_memory(profile, budget, effort=0.2)
    assert plan.recipes, "else there is nothing to explain"
    assert main(["plan", "--profile", "p.json", "--budget", str(plan.budget_bytes), "--effort", "0.2"]) == 0
    short = capsys.readouterr().out
    assert "ms per GiB" not in short
    assert "why: hyper-parallel explain plan.json" in short
    assert main(["explain", "plan.json"]) == 0
    long = capsys.readouterr().out
    assert len(long) > len(short)
    assert "cheaper than keeping" not in long
    assert "worth its memory" not in long
    ops = plan.recipes[0].regions[0].ops
    assert [op.name for op in ops if not op.is_needed] == ["g"], "the block's output, which no backward reads"
    assert "::g#0" not in long
    assert "Values that no backward reads" in long
    prices = [op.price_ms_per_gib for op in ops if op.is_needed]
    shown = [long.rindex(f"{price:,.0f}") for price in sorted(prices, reverse=True)]
    assert shown == sorted(shown)


def test_tables_and_lines_fit_into_sixty_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console = Console()
    console.table(
        "A title", ("value", "fate", "because"), [["layers.0.self_attn::mm#0", "saved", "it is " + "long " * 30]]
    )
    console.say("a sentence " * 20)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 60
    assert "  fate saved, because it is long" in "\n".join(shown)


def test_no_time_left_is_guessed_where_the_parts_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(is_plain=True).progress("x", 2) as advance:
        advance("a")
        advance("b")
    assert "left" not in capsys.readouterr().err
    with Console(is_plain=True).progress("x", 2, shares=[1.0, 1.0]) as advance:
        advance("a")
        advance("b")
    assert capsys.readouterr().err == "[1/2] a\n[2/2] b (a few seconds left)\n"


def test_a_long_wait_shows_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().waiting("searching", every_s=0.01):
        deadline = time.monotonic() + 600
        said = ""
        while "s so far" not in said and time.monotonic() < deadline:
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert "searching ... (0 s so far)" in said


WAITS = """
import signal, sys, tempfile, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
from hyper_parallel.cli import command_line, doctor
def run(args, console):
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        print("begun", flush=True)
        time.sleep(600)
doctor.run = run
sys.exit(command_line.main(["doctor"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_command_that_is_told_to_end_leaves_nothing_behind(number: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    folder = tmp_path / "temporary"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            os.kill(process.pid, number)
            _, said = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in said
    assert list(folder.iterdir()) == []


def test_ctrl_c_while_commands_are_imported_is_no_traceback() -> None:
    script = (
        "import sys, importlib.abc\n"
        "class Interrupts(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'hyper_parallel.cli.bench': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from hyper_parallel.cli import main\n"
        "sys.exit(main(['doctor']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 130
    assert done.stderr == "hyper-parallel: interrupted\n"
