"""``mindspore.train.Model``: a callback.

Model(...).train(epochs, data, callbacks=[callback(budget="20GiB")], dataset_sink_mode=False)

It fits the network with the first batch, in PyNative mode, and takes the plan off when training ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

__all__ = ["callback"]


def callback(
    *,
    budget: int | str,
    blocks: str | Sequence[str] | None = None,
    steps: int = 3,
    report: str | os.PathLike[str] | None = None,
) -> Any:  # mindspore.train.Callback
    """A ``Callback`` that keeps the training within ``budget``; ``report``: a file for the plan and what became of it."""
    from hyper_parallel.backends.mindspore.train_callback import BudgetCallback

    return BudgetCallback(budget, blocks=blocks, steps=steps, report=report)
