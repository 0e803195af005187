"""The front desk: what is understood, what is refused and how, exit codes, one JSON value and nothing else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.cli.command_line import COMMANDS, build_parser, main
from hyper_parallel.cli.completion import options_of, script_for
from hyper_parallel.cli.console import Console, plain_table
from hyper_parallel.planner.planning import plan_memory
from hyper_parallel.records.run_record import RegionTotal
from tests.unit.planner_core.small import small_profile
from tests.unit.report.runs import HOSTILE, planned_step, small_run, small_step

MODELS = """
import missing_on_purpose
"""
GOOD = """
def makes_nothing(): return 7
def raises(): raise KeyError("weights")
def leaves(): raise SystemExit(0)
not_callable = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "needs_more.py").write_text(MODELS)
    (tmp_path / "half_models.py").write_text(GOOD)
    for name in ("needs_more", "half_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert "example:\n" in text
    assert f"hyper-parallel {name}" in text.split("example:\n")[1]
    assert ("--json" in text) == (name != "completion")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["report"],
        ["demo", "--steps", "0"],
        ["plan", "a:b", "--budget", "1GiB", "--effort", "nan"],
        ["completion", "fish"],
    ],
    ids=str,
)
def test_what_is_not_understood_is_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert "usage: hyper-parallel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "--budget", "1GiB"], 2, "either MODULE:FACTORY or --profile FILE"),
        (["plan", "a:b", "--profile", "p.json", "--budget", "1GiB"], 2, "and not both"),
        (["plan", "a:b"], 2, "give --budget BYTES, or --mesh SIZES for a prediction"),
        (
            ["plan", "a:b", "--mesh", "pp=2,dp=2"],
            2,
            "cannot read 'dp=2' in 'pp=2,dp=2'; write it like pp=8,fsdp=16,tp=8",
        ),
        (["plan", "a:b", "--mesh", "pp=2", "--stages-per-rank", "2"], 2, "needs --schedule interleaved"),
        (["plan", "a:b", "--mesh", "pp=2", "--hop-speed", "fast"], 2, "--hop-speed: cannot read 'fast'"),
        (["plan", "half_models:raises", "--budget", "lots"], 2, "cannot read 'lots' as bytes"),
        (["plan", "half_models", "--budget", "1GiB"], 2, "write MODULE:FACTORY"),
        (["plan", "nowhere.at_all:f", "--budget", "1GiB"], 1, "there is no module 'nowhere.at_all'"),
        (["profile", "needs_more:f"], 1, "needs 'missing_on_purpose'"),
        (["profile", "half_models:other"], 1, "has no function 'other'; it has leaves, makes_nothing, raises"),
        (["profile", "half_models:not_callable"], 1, "has no function 'not_callable'"),
        (["profile", "half_models:raises"], 1, "half_models:raises() raised KeyError: 'weights'"),
        (["profile", "half_models:makes_nothing"], 1, "must return (model, step)"),
        (["profile", "half_models:leaves"], 1, "half_models:leaves() raised SystemExit: 0"),
        (["profile", "half_models.py:raises"], 2, "'half_models.py' is a file; name the module instead"),
        (["profile", "../folder/half_models.py:raises"], 2, "from the folder that holds it: half_models:raises"),
        (["profile", "half_models:raises", "-o", "no/p.json"], 1, "cannot write no/p.json: there is no folder no"),
        (["profile", "half_models:raises", "-o", "."], 1, "cannot write .: it is a folder; name a file in it"),
        (["plan", "half_models:raises", "--budget", "1GiB", "-o", "no/p.json"], 1, "there is no folder no"),
        (["bench", "half_models:raises", "--html", "no/r.html"], 1, "cannot write no/r.html: there is no folder no"),
        (["bench", "half_models:raises", "--ways", "swop"], 2, "known are none, recompute"),
        (["bench", "half_models:raises", "--ways", "none,none"], 2, "each way at most once"),
        (["bench", "half_models:raises", "--ways", "auto"], 2, "auto needs a --budget"),
        (["demo", "--disk-path", "no"], 2, "--disk-path: there is no folder no; name one on the disk to use"),
        (["demo", "--budget", "0"], 2, "is no memory at all"),
        (["explain", "missing.json"], 1, "cannot read missing.json: No such file"),
        (["report", "missing.json"], 1, "cannot read missing.json: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_answered_in_words(
    arguments: list[str], code: int, words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = answer(capsys, *arguments)
    assert found == code, err
    assert out == ""
    assert err.splitlines()[-1].startswith(f"hyper-parallel {arguments[0]}: ")
    assert words in err
    assert "Traceback" not in err


def test_a_traceback_is_shown_when_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "profile", "half_models:raises", "--traceback")
    assert code == 1
    assert "Traceback" in err
    assert "KeyError" in err


def test_a_run_is_drawn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run().save("run.json")
    code, out, _ = answer(capsys, "report", "run.json", "-o", "r.html", "--svg", "f.svg", "--trace", "t.json", "--json")
    assert code == 0
    assert json.loads(out) == {"written": ["r.html", "f.svg", "t.json"]}
    assert "</html>" in (here / "r.html").read_text()
    code, out, _ = answer(capsys, "report", "run.json", "-o", "r.html")
    assert code == 0
    assert "bitwise equal" in out
    assert "-25%" in out


def test_a_way_that_swapped_nothing_says_why(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = dataclasses.replace(small_run().steps[1], out_bytes=0, back_bytes=0)
    small_run(steps=(small_run().steps[0], idle)).save("run.json")
    code, out, _ = answer(capsys, "report", "run.json")
    assert code == 0
    assert "swap: nothing was swapped; stayed where it was: below_min_bytes 3.00 MiB" in out
    assert "none: nothing was swapped" not in out


def test_a_file_that_cannot_be_written_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run().save("run.json")
    code, _, err = answer(capsys, "report", "run.json", "--svg", "nowhere/f.svg")
    assert code == 1
    assert err == "hyper-parallel report: cannot open nowhere/f.svg: No such file or directory\n"


def test_a_figure_of_an_unknown_way_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run().save("run.json")
    code, _, err = answer(capsys, "report", "run.json", "--svg", "f.svg", "--timeline-of", "swop")
    assert code == 1
    assert "known are none, swap, auto" in err


@pytest.fixture
def planned(here: Path) -> Any:
    profile = small_profile(blocks=6)
    profile.save("profile.json")
    return profile


def test_a_plan_is_made_from_a_profile_and_explained(
    planned: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = str(plan_memory(planned, 10**6, effort=0.2).untouched.peak_bytes - 10)
    code, out, err = answer(capsys, "plan", "--profile", "profile.json", "--budget", budget, "--json")
    assert code == 0, err
    assert json.loads(out)["predicted"]["peak_bytes"] <= int(budget)
    code, out, _ = answer(capsys, "explain", "plan.json", "--profile", "profile.json", "--json")
    said = json.loads(out)
    assert said["budget_bytes"] == int(budget)
    assert sum(op.get("swapped_bytes", 0) + op.get("recomputed_bytes", 0) for op in said["ops"]) > 0
    code, out, _ = answer(capsys, "explain", "plan.json", "--profile", "profile.json", "--diff", "plan.json")
    assert code == 0
    assert "plan.json does the same" in out
    assert "Bytes by kind of op" in out


REGIONS = (
    RegionTotal(count=6, names=tuple(f"layers.{at}" for at in range(6))),
    RegionTotal(count=1, reason="a compiled module", names=("head",)),
)
REGION_LINES = [
    "6 regions run from a tape (layers.0, layers.1, layers.2, layers.3 and 2 more)",
    "1 region runs Python again: a compiled module (head)",
]


def test_explain_says_how_the_recomputed_regions_ran(
    planned: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = plan_memory(planned, 10**6, effort=0.2).untouched.peak_bytes - 10
    plan = plan_memory(planned, budget, effort=0.2)
    plan.save("plan.json")
    recipes = [plan.recipes[block.recipe] for block in plan.blocks if block.recipe is not None]
    count = sum(region.is_replayed for recipe in recipes for region in recipe.regions)
    assert count > 0, "else there is nothing to explain"
    code, out, _ = answer(capsys, "explain", "plan.json")
    assert code == 0
    assert f"{count} region" in out
    assert "from a tape where torch's native recorder is there" in " ".join(out.split())
    steps = (small_step("none"), dataclasses.replace(planned_step(), regions=REGIONS), small_step("swap"))
    dataclasses.replace(small_run(), steps=steps).save("run.json")
    code, out, _ = answer(capsys, "explain", "plan.json", "--run", "run.json")
    assert code == 0
    for line in REGION_LINES:
        assert f"in the run, auto: {line}" in " ".join(out.split())
    code, out, _ = answer(capsys, "explain", "plan.json", "--run", "run.json", "--json")
    said = json.loads(out)
    assert said["recomputed_regions"] == count
    assert said["regions"][1] == {"reason": "a compiled module", "count": 1, "names": ["head"]}


def test_report_says_how_the_recomputed_regions_ran(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = (small_step("none"), dataclasses.replace(small_step("recompute"), regions=REGIONS))
    dataclasses.replace(small_run(), steps=steps).save("run.json")
    code, out, _ = answer(capsys, "report", "run.json", "-o", "r.html")
    assert code == 0
    for line in REGION_LINES:
        assert f"recompute: {line}" in " ".join(out.split())
    assert "none: " not in out
    page = Path("r.html").read_text()
    assert "Recomputed regions" in page
    assert "from a tape" in page
    assert "a compiled module" in page


def test_a_budget_that_cannot_be_kept_says_what_can(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = answer(capsys, "plan", "--profile", "profile.json", "--budget", "101B")
    assert code == 1
    assert "the smallest peak found is" in err


def test_a_mesh_is_predicted_with_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(Path(__file__).parents[1] / "planner_core" / "data" / "stack_8k_h200.json")
    mesh = ["plan", "--profile", profile, "--mesh", "pp=4,fsdp=2,tp=2", "--microbatches", "8"]
    code, out, err = answer(capsys, *mesh)
    assert code == 0, err
    assert "Predicted for 16 devices" in out
    assert "a prediction, not a measurement; it assumes:" in out
    assert "tp divides weights, states" in out
    code, out, _ = answer(capsys, *mesh, "--schedule", "interleaved", "--hop-speed", "1GB", "--json")
    told = json.loads(out)
    assert code == 0
    assert [row["stages"] for row in told["ranks"]] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert told["devices"] == 16


def test_another_plan_is_compared(planned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    alone = plan_memory(planned, 10**6, effort=0.2)
    alone.save("a.json")
    plan_memory(planned, alone.untouched.peak_bytes - 10, effort=0.2).save("b.json")
    code, out, _ = answer(capsys, "explain", "a.json", "--diff", "b.json", "--json")
    assert code == 0
    assert any(change.startswith("budget:") for change in json.loads(out)["changes"])


def test_completion_knows_every_command_and_option() -> None:
    options = options_of(build_parser())
    assert list(options) == [name for name, _ in COMMANDS]
    assert "--budget" in options["plan"]
    assert "--one" not in options["demo"], "not for people"
    words = 'COMP_WORDS=(hyper-parallel plan --bud); COMP_CWORD=2; _hyper_parallel; echo "${COMPREPLY[@]}"'
    script = script_for("bash", options) + words
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["--budget"], done.stderr
    words = 'COMP_WORDS=(hyper-parallel d); COMP_CWORD=1; _hyper_parallel; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", script_for("bash", options) + words], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["demo", "doctor"], done.stderr
    assert script_for("zsh", options).startswith("autoload -U +X bashcompinit")


def test_tables_without_rich_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["[bold]a[/bold]", "1.00 GiB"], [HOSTILE, "2 B"]]
    text = plain_table("Title", ("name", "bytes"), rows, (0,))
    assert text.splitlines()[0] == "Title"
    Console(is_plain=True).table("Title", ("name", "bytes"), rows)
    assert capsys.readouterr().out == text + "\n"
    Console().table("Title", ("name", "bytes"), rows)
    assert "[bold]a[/bold]" in capsys.readouterr().out, "a name is no markup"


def test_progress_without_a_terminal_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress("work", 2, shares=[1.0, 1.0]) as advance:
        advance("first")
        advance("second")
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(" (")[0] for line in said.err.splitlines()] == ["[1/2] first", "[2/2] second"]
    assert "left" in said.err.splitlines()[1]
