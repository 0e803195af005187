"""The recorder and the runner under the address and the thread sanitizer: the tape's own tests, and a slice of the fuzzer.

Only our extension is instrumented. Python and torch are not, so three things differ from an all-instrumented program:
    The sanitizer's library and libstdc++ are loaded before Python (``LD_PRELOAD``). Without the latter, the first C++
    exception of torch ends the process. The compiler runs without them.
    Leaks are not looked for: Python itself leaves memory behind at its end.
    Accesses that the thread sanitizer sees through its interceptors in torch's code are ignored.
No report needed a suppression.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_HERE = "tests/integration/tape"
_LIMIT_S = 1100
_OPTIONS = {
    "address": ("libasan.so", "ASAN_OPTIONS", "detect_leaks=0"),
    "thread": ("libtsan.so", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1"),
}
_FUZZED = [("wide", 50), ("effects", 50), ("modules", 30)]  # the last has two threads in one graph

pytestmark = pytest.mark.long


def library(name: str) -> Path:
    """A library of the compiler's."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    said = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    path = Path(said.strip())
    if not path.is_absolute():
        pytest.skip(f"the compiler has no {name} on this machine")
    return path.resolve()


class Sanitized:
    """Runs Python with one sanitizer's build of the extension."""

    def __init__(self, build: str, folder: Path) -> None:
        name, variable, options = _OPTIONS[build]
        self._reports = folder / "report"
        self._plain = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
            "HYPER_PARALLEL_NATIVE": "1",
            "HYPER_PARALLEL_NATIVE_BUILD": build,
        }
        preloaded = f"{library(name)} {library('libstdc++.so.6')}"
        self._environment = {
            **self._plain,
            "LD_PRELOAD": preloaded,
            variable: f"{options}:log_path={self._reports}",
        }

    def build(self) -> None:
        done = self._run(self._plain, "-c", "from hyper_parallel.backends.torch import native; print(native._built())")
        assert done.returncode == 0, done.stderr[-4000:]
        calls = b"__asan_report" if "asan" in self._environment["LD_PRELOAD"] else b"__tsan_read"
        assert calls in Path(done.stdout.strip()).read_bytes(), "the extension is not instrumented"

    def run(self, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        return self._run({**self._environment, "HYPER_PARALLEL_NATIVE_FAULT": fault}, *arguments)

    def reports(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._reports.parent.glob("report.*"))

    @staticmethod
    def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )


@pytest.fixture(params=list(_OPTIONS))
def sanitized(request: pytest.FixtureRequest, tmp_path: Path) -> Sanitized:
    made = Sanitized(request.param, tmp_path)
    made.build()
    return made


def pytest_arguments(*chosen: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", *chosen)


def test_the_tapes_own_tests_run_without_a_report(sanitized: Sanitized) -> None:
    done = sanitized.run(*pytest_arguments(_HERE, "--ignore", f"{_HERE}/test_named_faults.py"))
    assert sanitized.reports() == ""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(("territory", "programs"), _FUZZED)
def test_fuzzed_programs_run_without_a_report(
    territory: str, programs: int, sanitized: Sanitized, tmp_path: Path
) -> None:
    output = str(tmp_path / "fuzz.json")
    arguments = ["--programs", str(programs), "--territory", territory, "--output", output, "--limit-s", "600"]
    done = sanitized.run("scripts/fuzz.py", *arguments, "--no-shrink")
    assert sanitized.reports() == ""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_thread_sanitizer_sees_a_lock_that_is_missing(tmp_path: Path) -> None:
    sanitized = Sanitized("thread", tmp_path)
    sanitized.build()
    sanitized.run(*pytest_arguments(f"{_HERE}/test_threads.py"), fault="lock_of_unpack")
    assert "WARNING: ThreadSanitizer: data race" in sanitized.reports()
    assert "Tape::unpack" in sanitized.reports()
