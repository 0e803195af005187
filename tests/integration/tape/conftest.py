"""Every test here records: the native recorder is switched on, and built where the machine's cache has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.backends.torch import native


@pytest.fixture(scope="package", autouse=True)
def one_thread_per_op() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "1")
    if native.load() is None:
        pytest.skip(f"no native recorder on this machine: {native.why_not()}")
    hp.SwapManager().reset()
    yield
    hp.SwapManager().reset()
