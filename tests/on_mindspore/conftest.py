"""Every test starts with a fresh manager on MindSpore, and leaves none of its records behind."""

from __future__ import annotations

from collections.abc import Iterator

import mindspore
import pytest

import hyper_parallel as hp
from hyper_parallel.platform.mindspore import compat


@pytest.fixture(scope="package", autouse=True)
def ops_run_at_once() -> None:
    """The asynchronous pipeline is slower on few cores, and reports an error at some later op."""
    mindspore.set_device("CPU")
    mindspore.runtime.launch_blocking()


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    hp.SwapManager().reset()
    yield
    compat.end_failed_gradient()
    hp.configure(None)
    hp.SwapManager().reset()
