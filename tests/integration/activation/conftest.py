"""Every test starts with a fresh manager on torch, and leaves none of its records behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hyper_parallel as hp


@pytest.fixture(scope="package", autouse=True)
def one_thread_per_op() -> Iterator[None]:
    """Tensors here are tiny: a second thread only waits, and on a busy machine it waits long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    if request.node.get_closest_marker("python_replay") is not None:
        monkeypatch.setenv("HYPER_PARALLEL_NATIVE", "0")
    hp.SwapManager().reset()
    yield
    hp.configure(None)
    hp.SwapManager().reset()
