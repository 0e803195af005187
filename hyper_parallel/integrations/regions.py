"""Blocks whose every call goes through one function: for a treatment that is a policy or ``swap``, and no rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hyper_parallel.backends.torch.planner.blocks import find_blocks, require_module
from hyper_parallel.backends.torch.planner.replacements import AppliedBlocks, Replacements
from hyper_parallel.core.activation_checkpoint import checkpoint, swap
from hyper_parallel.planner.backend import Model

Output = TypeVar("Output")

__all__ = ["replace_blocks", "swapped", "with_policy"]


def swapped(function: Callable[..., Output], *args: Any, **kwargs: Any) -> Output:
    """Run a block; what it saves for backward is swapped."""
    return swap(function, *args, **kwargs)


def with_policy(function: Callable[..., Output], *args: Any, policy_fn: Any, **kwargs: Any) -> Output:
    """Run a block as a region that follows the policy; its inputs are swapped."""
    return checkpoint(function, *args, policy_fn=policy_fn, swap_inputs=True, **kwargs)


def replace_blocks(model: Model, region: Callable[..., Any], *, blocks: str | Sequence[str] | None) -> AppliedBlocks:
    """Let every block be called through ``region(block, *args, **kwargs)``."""
    found = find_blocks(require_module(model, "apply"), blocks, who="apply")
    replacements = Replacements(model)
    try:
        for block in found:
            replacements.wrap(block.name, block.module, region, may_be_compiled=region is swapped)
    except BaseException:
        replacements.restore()
        raise
    return AppliedBlocks(replacements)
