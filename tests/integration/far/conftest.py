"""Disk tiers that are closed after their test."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget

from .backend import LIMIT_S

MIB = 2**20


@pytest.fixture
def make_tier(tmp_path: Path):
    tiers: list[DiskTier] = []

    def make(limit: int | None = None, *, host_limit: int = 1024 * MIB, wait_limit_s: float = LIMIT_S) -> DiskTier:
        tier = DiskTier(str(tmp_path), limit_bytes=limit, budget=HostBudget(host_limit), wait_limit_s=wait_limit_s)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()
