"""Every test starts with a fresh manager on torch, and leaves none of its records behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hyper_parallel as hp


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    hp.SwapManager().reset()
    yield
    hp.configure(None)
    hp.SwapManager().reset()
