"""Commands in processes in which torch cannot be imported, as on a machine that has MindSpore alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["run", "run_python"]

ROOT = Path(__file__).parents[2]
# Python imports it at its start, in the command and in every process that the command starts.
BLOCKER = """
import importlib.metadata
import sys


class _NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


_version = importlib.metadata.version


def version(name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return _version(name)


importlib.metadata.version = version
sys.meta_path.insert(0, _NoTorch())
"""


def run_python(
    folder: Path, *arguments: str, code: int = 0, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder`` without torch, and without a choice of the framework unless ``settings`` has one."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(BLOCKER)
    environment = {name: value for name, value in os.environ.items() if name != "HYPER_PARALLEL_PLATFORM"}
    environment |= {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"} | dict(settings or {})
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def run(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run a command; what it printed, and what it said of an error."""
    done = run_python(folder, "-m", "hyper_parallel.cli", *arguments, code=code)
    return done.stdout, done.stderr
