"""What the Makefile and the lists of torch releases promise."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from hyper_parallel._version import TESTED_TORCH, __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _folder_with_stubs(folder: pathlib.Path, *, torch_status: int, mindspore_status: int) -> None:
    """The Makefile beside environments whose python only writes down what it was asked, and ends with a status."""
    (folder / "Makefile").write_text((ROOT / "Makefile").read_text())
    (folder / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements/dev.txt", "requirements/mindspore.txt"):
        (folder / name).write_text("")
    for name, status in ((".venv", torch_status), (".venv-mindspore", mindspore_status)):
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\necho {name} $* >> asked.txt\nexit {status}\n")
        python.chmod(0o755)
        (folder / name / ".installed").write_text("")


@pytest.mark.parametrize(
    ("torch_status", "mindspore_status", "is_good"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)]
)
def test_make_test_runs_every_part_and_fails_at_the_end(
    tmp_path: pathlib.Path, torch_status: int, mindspore_status: int, is_good: bool
) -> None:
    _folder_with_stubs(tmp_path, torch_status=torch_status, mindspore_status=mindspore_status)
    done = subprocess.run(["make", "test"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is is_good, done.stderr
    asked = [line.split()[:4] for line in (tmp_path / "asked.txt").read_text().splitlines()]
    assert asked == [
        [".venv", "-c", "from", "hyper_parallel.backends.torch"],
        [".venv", "-m", "pytest", "tests"],
        [".venv", "-m", "pytest", "tests/integration/activation"],
        [".venv-mindspore", "-m", "pytest", "tests/on_mindspore"],
        [".venv-mindspore", "-m", "pytest", "tests/contract"],
    ]


def test_readme_and_pyproject_name_the_torch_releases_of_the_one_list() -> None:
    words = ", ".join(TESTED_TORCH)
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    assert f"PyTorch {TESTED_TORCH[0]} and later (tested: {words})" in readme
    assert f"# Tested: torch {words} " in project
    assert f'torch = ["torch>={TESTED_TORCH[0]}"' in project
    assert f"PyTorch {TESTED_TORCH[0]} and later" in (ROOT / "docs" / "index.md").read_text()


def test_the_release_that_the_makefile_installs_is_one_of_the_list() -> None:
    installed = set(re.findall(r"torch==(\d+\.\d+)", (ROOT / "Makefile").read_text()))
    assert len(installed) == 1
    assert installed < set(TESTED_TORCH)
    script = (ROOT / "scripts" / "test_versions.sh").read_text()
    assert f"main_release={installed.pop()} " in script
    assert "TESTED_TORCH" in script
    assert "make test-versions" in (ROOT / ".ci" / "run").read_text()


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
