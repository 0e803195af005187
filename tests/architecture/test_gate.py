"""What ``make check`` runs, and that ``make test`` runs whatever it leaves out."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PARTS = {
    "ruff format": "ruff format --check .",
    "ruff check": "ruff check .",
    "types": "mypy",
    "docs": "mkdocs build --strict --quiet",
    "packages": "python scripts/audit.py",
    "tests": "python -m pytest tests/unit tests/architecture -q -m not long and not slow",
}


def _run_check(folder: pathlib.Path, *, failing: str | None) -> tuple[int, set[str]]:
    """``make check`` in an environment whose programs only write down what they were asked."""
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "requirements").mkdir()
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("pyproject.toml", "requirements/dev.txt", ".venv/.installed"):
        (folder / name).write_text("")
    for name in ("ruff", "mypy", "mkdocs", "python"):
        script = f'#!/bin/sh\necho "{name}${{*:+ $*}}" >> asked.txt\ntest "{name}${{*:+ $*}}" != "{failing}"\n'
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    done = subprocess.run(["make", "check"], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, set((folder / "asked.txt").read_text().splitlines())


def test_make_check_runs_every_part(tmp_path: pathlib.Path) -> None:
    assert _run_check(tmp_path, failing=None) == (0, set(PARTS.values()))


@pytest.mark.parametrize("part", sorted(PARTS))
def test_make_check_fails_when_one_part_fails_and_still_runs_the_others(tmp_path: pathlib.Path, part: str) -> None:
    status, asked = _run_check(tmp_path, failing=PARTS[part])
    assert status != 0
    expected = set(PARTS.values()) - ({PARTS["ruff check"]} if part == "ruff format" else set())
    assert asked == expected


def test_make_test_runs_what_make_check_leaves_out() -> None:
    (command,) = re.findall(r"-m pytest (tests -q .*?) \|\|", MAKEFILE)
    assert command.endswith('-m "not long"'), "tests marked slow run there"
    assert re.findall(r"--ignore=(\S+)", command) == ["tests/gpu", "tests/on_mindspore"]
