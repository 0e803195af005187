"""One thread, the torch platform, an empty engine and a folder of its own for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform.platform import get_torch_platform


@pytest.fixture(autouse=True)
def fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages set settings for the process and write files: neither outlives its page."""
    get_torch_platform()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPER_PARALLEL_PLAN_STORE", str(tmp_path / "plans"))
    hp.SwapManager().reset()
    yield
    hp.configure(None)
    hp.SwapManager().reset()
    torch.set_num_threads(threads)
