"""Settings and statistics begin afresh in every test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

import hyper_parallel as hp
from hyper_parallel import config


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    for field in dataclasses.fields(hp.SwapConfig):
        monkeypatch.delenv(f"HYPER_PARALLEL_{field.name.upper()}", raising=False)
    hp.configure(None)
    yield
    hp.configure(None)
    assert config._Settings.override.get() is None, "a with-block restores what was"
    hp.SwapManager().reset()
