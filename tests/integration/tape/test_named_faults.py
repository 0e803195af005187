"""Every condition of the tape is needed: with one switched off (``native/faults.h``), its program fails.

The faults are in a build of their own, which is made once and cached. They run in one other process (``fault_worker``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.backends.torch import native

from .fault_programs import ONLY_ELSEWHERE, PROGRAMS

_SOURCES = Path(native.__file__).parent
_TESTS = Path(__file__).parents[1]
_LIMIT_S = 1100


def run_python(*arguments: str, build: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parents[1])]),
        "HYPER_PARALLEL_NATIVE": "1",
        "HYPER_PARALLEL_NATIVE_BUILD": build,
        "HYPER_PARALLEL_SUMMARY": "0",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


@pytest.fixture(scope="module")
def failures() -> dict[tuple[str, str], str | None]:
    """How each program failed, by its name and the fault that was on; None where it was right."""
    done = run_python("-m", "tape.fault_worker", build="faults")
    if "no native recorder" in done.stderr and native.why_not() is not None:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, fault): failure for name, fault, failure in rows}


def test_every_named_fault_has_a_program_or_a_reason() -> None:
    text = "".join(path.read_text() for path in _SOURCES.glob("*.h"))
    named = set(re.findall(r'HP_FAULT\("(\w+)"\)', text))
    assert named == PROGRAMS.keys() | ONLY_ELSEWHERE.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right_without_its_fault_and_fails_with_it(
    name: str, failures: dict[tuple[str, str], str | None]
) -> None:
    assert failures[name, ""] is None
    assert failures[name, name] is not None, "the fault was not noticed"


def test_the_normal_build_has_no_faults() -> None:
    recorder = native.load()
    assert recorder is not None
    code = Path(recorder.__file__).read_bytes()
    assert b"HYPER_PARALLEL_NATIVE_FAULT" not in code
    assert b"probation_comparison" not in code


def test_an_unknown_build_is_refused_by_name() -> None:
    program = "from hyper_parallel.backends.torch import native; assert native.load() is None; print(native.why_not())"
    done = run_python("-c", program, build="fautls")
    assert "HYPER_PARALLEL_NATIVE_BUILD is 'fautls'; it may be faults, address, thread, or empty" in done.stdout


def test_a_dispatch_key_that_is_taken_refuses_the_recorder_and_does_not_end_the_process() -> None:
    """As in a torch that begins to use the key itself."""
    program = """
import torch
from hyper_parallel.backends.torch import native
library = torch.library.Library("_", "IMPL", "Fake")
library.fallback(lambda op, *args, **kwargs: op(*args, **kwargs))
assert native.load() is None
print(native.why_not())
print(torch.ones(2).sum().item())
"""
    done = run_python("-c", program, build="")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Tried to register multiple backend fallbacks for the same dispatch key Fake" in done.stdout
    assert done.stdout.splitlines()[-1] == "2.0"
