"""How often one step calls each module of a model: for blocks that a step runs many times."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch.planner.blocks import BlockRef, device_of, find_blocks
from hyper_parallel.backends.torch.planner.trial_guard import restored_after

__all__ = ["find_blocks_of_step"]


def find_blocks_of_step(
    model: nn.Module, patterns: str | Sequence[str] | None, step: Callable[[], Any], *, who: str
) -> list[BlockRef]:
    """The blocks of a model, also those that are only repeated because the step calls them many times."""
    return find_blocks(model, patterns, who=who, calls=lambda: _count_calls(model, step, who))


def _count_calls(model: nn.Module, step: Callable[[], Any], who: str) -> Mapping[str, int]:
    """Run the step without gradients, so that nothing is kept and it fits; its backward then has nothing to do and fails."""
    counts: Counter[str] = Counter()

    def count(path: str, module: nn.Module, args: Any) -> None:
        counts[path] += 1

    hooks = [module.register_forward_pre_hook(functools.partial(count, path)) for path, module in model.named_modules()]
    try:
        with restored_after(model, device_of(model, who), who=who), torch.no_grad():
            with contextlib.suppress(Exception):  # a step that fails for another reason fails again when it is measured
                step()
    finally:
        for hook in hooks:
            hook.remove()
    return counts
