"""TRL's activation offloading, where it can be had."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["trl_offloading"]


def trl_offloading() -> Callable[..., contextlib.AbstractContextManager[object]] | None:
    """TRL's class, from an installed TRL or from the one file that ``TRL_OFFLOAD_FILE`` names; None where there is neither."""
    path = os.environ.get("TRL_OFFLOAD_FILE")
    if path:
        sys.path.insert(0, str(Path(path).parent))
    try:
        importlib.import_module("accelerate").PartialState()  # its logger refuses to warn without one
        module = importlib.import_module(Path(path).stem if path else "trl.models.activation_offloading")
    except ImportError:
        return None
    offloading: Callable[..., contextlib.AbstractContextManager[object]] = module.OffloadActivations
    return offloading
