"""Installs what was built into empty environments, one for each Python, and tries it as a user would.

    python scripts/check_release.py dist [--python 3.10 3.11 3.12 3.13] [--torch 2.13.0] [--without-torch]

For every Python and every file of the folder: an environment, torch (unless left out), the file, then ``import hyper_parallel``,
``hyper-parallel doctor`` and the tiny demo; without torch the import, and a doctor that names what is missing.
Prints a row for each, and exits with 1 unless every row that could be run passed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LIMIT_S = 3600


class Failed(Exception):
    """A command that did not end as it should."""


def run(*command: str, cwd: Path, expected: int = 0) -> str:
    """What a command printed."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HYPER_PARALLEL_PLATFORM")
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != expected:
        raise Failed(f"{' '.join(command[-3:])} ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return done.stdout + done.stderr


def usable(name: str) -> str | None:
    """The path of a Python that runs; some machines have a stand-in of that name that only says what to install."""
    path = shutil.which(name)
    if path is None or subprocess.run([path, "--version"], capture_output=True, check=False).returncode != 0:
        return None
    return path


def check(python: str, file: Path, torch: str | None) -> str:
    """Install the file with this Python and try it; what was seen."""
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_release_") as folder:
        place = Path(folder)
        run(python, "-m", "venv", "env", cwd=place)
        inside = str(place / "env" / "bin" / "python")
        extra = "" if torch is None else "[torch,cli]"
        if torch is not None:
            run(inside, "-m", "pip", "install", "--quiet", f"torch=={torch}", cwd=place)
        run(inside, "-m", "pip", "install", "--quiet", f"{file}{extra}", cwd=place)
        version = run(inside, "-c", "import hyper_parallel; print(hyper_parallel.__version__)", cwd=place).strip()
        command = str(place / "env" / "bin" / "hyper-parallel")
        if torch is None:
            if "not installed" not in run(command, "doctor", cwd=place, expected=1):
                raise Failed("doctor does not say what is missing")
            return f"passed: {version}, import and doctor"
        run(command, "doctor", cwd=place)
        run(command, "demo", "--size", "tiny", cwd=place)
        return f"passed: {version}, import, doctor and demo on torch {torch}"


def main() -> int:
    """Check every file with every Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS))
    parser.add_argument("--torch", default="2.13.0")
    parser.add_argument("--without-torch", action="store_true")
    options = parser.parse_args()
    files = sorted([*options.folder.resolve().glob("*.whl"), *options.folder.resolve().glob("*.tar.gz")])
    if not files:
        print(
            f"check_release: there is no wheel and no sdist in {options.folder}; build them with python -m build",
            file=sys.stderr,
        )
        return 1
    failed = False
    for version in options.python:
        python = usable(f"python{version}")
        for file in files:
            try:
                word = (
                    "not here"
                    if python is None
                    else check(python, file, None if options.without_torch else options.torch)
                )
            except (Failed, subprocess.TimeoutExpired) as error:
                word, failed = f"FAILED: {error}", True
            print(f"python {version}  {file.name}  {word}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
