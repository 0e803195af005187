"""The native recorder's sources: they compile. The tape's own tests are skipped where there is no recorder."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from hyper_parallel.backends.torch import native


@pytest.mark.slow
def test_they_compile_where_there_are_a_compiler_and_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no C++ compiler, or no headers of Python, on this machine")
    monkeypatch.delenv("HYPER_PARALLEL_NATIVE", raising=False)
    assert native.load() is not None, native.why_not()
