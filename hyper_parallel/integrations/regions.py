"""Blocks whose every call goes through one function: for a treatment that is a policy or ``swap``, and no rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.backends.torch.graph_regions import InGraph, graph_region
from hyper_parallel.backends.torch.planner.blocks import find_blocks, require_module
from hyper_parallel.backends.torch.planner.replacements import AppliedBlocks, Replacements
from hyper_parallel.core.activation_checkpoint import checkpoint, swap
from hyper_parallel.core.activation_checkpoint.policy import as_op_policy
from hyper_parallel.planner.backend import Model

__all__ = ["WithPolicy", "replace_blocks", "swapped"]


class _Swapped:
    """Runs a block; what it saves for backward is swapped."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return swap(function, *args, **kwargs)

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph."""
        return InGraph(region=None, bound={})

    def __reduce__(self) -> str:
        return "swapped"


swapped = _Swapped()


class WithPolicy:
    """Runs a block as a region that follows the policy; its inputs are swapped."""

    def __init__(self, policy_fn: Any) -> None:
        self._policy = as_op_policy(policy_fn, where="apply")

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function as a region."""
        return checkpoint(function, *args, policy_fn=self._policy, swap_inputs=True, **kwargs)

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph."""
        return InGraph(region=graph_region(self._policy, f"policy on {label}"), bound={}, swaps_inputs=True)


def replace_blocks(model: Model, region: Callable[..., Any], *, blocks: str | Sequence[str] | None) -> AppliedBlocks:
    """Let every block be called through ``region(block, *args, **kwargs)``."""
    found = find_blocks(require_module(model, "apply"), blocks, who="apply")
    replacements = Replacements(model)
    try:
        for block in found:
            replacements.wrap(block.name, block.module, region, may_be_compiled=region is swapped, may_be_in_graph=True)
    except BaseException:
        replacements.restore()
        raise
    return AppliedBlocks(replacements)
