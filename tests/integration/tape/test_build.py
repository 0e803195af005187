"""Where the recorder cannot be built or loaded, regions run Python again, and the reason is said."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import native

from .models import WIDTH, mlp
from .test_values import are_equal, once, ours, plain, steps


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder in which nothing was built yet."""
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE_CACHE", str(tmp_path / "cache"))
    native._loaded.cache_clear()
    yield tmp_path / "cache"
    native._loaded.cache_clear()


def compiler(folder: Path, script: str) -> str:
    """A program that stands for a C++ compiler."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def assert_python_runs_again(reason: str) -> None:
    assert are_equal(steps(mlp, ours, once), steps(mlp, plain, once))
    stats = hp.stats()
    assert stats.regions_from_tape == 0
    (found,) = stats.regions_from_python
    assert found.startswith("no native recorder: ")
    assert reason in found


def test_a_build_that_fails_is_not_tried_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setenv("CXX", compiler(tmp_path, f"echo run >> {runs}; echo what is wrong >&2; exit 1"))
    assert_python_runs_again("failed; what it said is in ")
    assert "building the native recorder" in capfd.readouterr().err
    (log,) = cache.glob("*/build.log")
    assert log.read_text() == "what is wrong\n"
    native._loaded.cache_clear()  # the next process
    hp.SwapManager().reset()
    assert_python_runs_again("its build failed before")
    assert runs.read_text() == "run\n"


def test_without_a_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_python_runs_again("there is no C++ compiler (install g++, or name one with CXX)")


def test_without_the_headers_of_python(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert_python_runs_again("Python's headers are missing")


def test_what_was_built_for_another_torch_does_not_load(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes_its_output = 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"'
    monkeypatch.setenv("CXX", compiler(tmp_path, writes_its_output))
    assert_python_runs_again("does not load")


def test_a_cache_folder_that_cannot_be_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, and no folder")
    monkeypatch.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert_python_runs_again("cannot be used")


def test_a_long_build_says_that_it_goes_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_PROGRESS_S", 1)
    monkeypatch.setenv("CXX", compiler(tmp_path, "sleep 3; exit 1"))
    assert native.load() is None
    assert "still building, 1 s so far" in capfd.readouterr().err


def test_it_is_on_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    for setting, regions in ((None, 1), ("", 1), ("0", 0)):
        if setting is None:
            monkeypatch.delenv("HYPER_PARALLEL_NATIVE")
        else:
            monkeypatch.setenv("HYPER_PARALLEL_NATIVE", setting)
        hp.SwapManager().reset()
        hp.checkpoint(mlp(), x).sum().backward()
        assert hp.stats().regions_from_tape == regions, setting
