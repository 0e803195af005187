"""Output has no width in these tests unless one of them sets it: a worker process of pytest, like some shells, names one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
