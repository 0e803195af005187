"""The three things that can become of an activation. Every policy, rule and plan is translated into these."""

from __future__ import annotations

import enum

__all__ = ["Fate"]


class Fate(str, enum.Enum):
    """What becomes of a value that backward needs."""

    SAVE = "save"  # stays on the device
    SWAP = "swap"  # leaves for far memory, and is back when backward needs it
    RECOMPUTE = "recompute"  # is made again in backward
