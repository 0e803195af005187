"""The accelerators that MindSpore sees. No Ascend has run this yet."""

from __future__ import annotations

import mindspore

from hyper_parallel.backends.machine import Accelerator
from hyper_parallel.platform.mindspore.device import on_cpu, target

__all__ = ["accelerators"]


def accelerators() -> tuple[Accelerator, ...]:
    """Every Ascend. MindSpore does not say how much memory it has or has free, and its links are not measured."""
    count = 0 if on_cpu() else int(mindspore.device_context.ascend.device_count())
    return tuple(Accelerator(name=target()) for _ in range(count))
