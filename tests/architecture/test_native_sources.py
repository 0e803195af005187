"""The native recorder's sources: they compile. The tape's own tests are skipped where there is no recorder."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest

from hyper_parallel.backends.torch import native, storages


@pytest.mark.slow
def test_they_compile_where_there_are_a_compiler_and_the_headers_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("no C++ compiler, or no headers of Python, on this machine")
    monkeypatch.delenv("HYPER_PARALLEL_NATIVE", raising=False)
    assert native.load() is not None, native.why_not()


def test_both_lists_of_nodes_between_a_weight_and_its_views_are_the_same() -> None:
    """Hooks around a region see the graph of a weight's view alone; the packer knows a weight by the same nodes."""
    source = (Path(native.__file__).parent / "forward_end.h").read_text()
    assert set(re.findall(r'"(\w+Backward0)"', source)) == storages.PASS_THROUGH
