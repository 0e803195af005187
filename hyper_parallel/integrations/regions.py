"""Blocks whose every call goes through one function, for those who bring a policy and no rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.backends.torch.planner.blocks import find_blocks, require_module
from hyper_parallel.backends.torch.planner.replacements import AppliedBlocks, Replacements
from hyper_parallel.core.activation_checkpoint import checkpoint, swap
from hyper_parallel.planner.backend import Model

__all__ = ["replace_blocks", "swapped", "with_policy"]


class _AppliedRegions(AppliedBlocks):
    """Regions in the place of blocks; ``stats()``, ``remove()``, or a ``with`` block."""

    def stats(self) -> Mapping[str, Any]:
        """What the engine counted since."""
        return self._counted()


def swapped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What it saves for backward leaves, and comes back in time."""
    return swap(function, *args, **kwargs)


def with_policy(function: Callable[..., Any], *args: Any, policy_fn: Any, **kwargs: Any) -> Any:
    """A region that follows the policy; its inputs leave."""
    return checkpoint(function, *args, policy_fn=policy_fn, swap_inputs=True, **kwargs)


def replace_blocks(model: Model, region: Callable[..., Any], *, blocks: str | Sequence[str] | None) -> _AppliedRegions:
    """Let every block be called through ``region(block, *args, **kwargs)``."""
    found = find_blocks(require_module(model, "apply"), blocks, who="apply")
    replacements = Replacements(model)
    try:
        for block in found:
            replacements.wrap(block.name, block.module, region, may_be_compiled=region is swapped)
    except BaseException:
        replacements.restore()
        raise
    return _AppliedRegions(replacements)
