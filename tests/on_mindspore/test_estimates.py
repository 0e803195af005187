"""What needs no framework also works on MindSpore."""

from __future__ import annotations

import hyper_parallel as hp


def test_estimates_need_no_framework() -> None:
    found = hp.estimate(hp.ModelShape(width=64, layers=2, heads=4, hidden=128), tokens=64)
    assert found.way("recompute").activation_bytes < found.way("plain").activation_bytes
