"""Collectives with a gradient: the contract, and what of it can be decided without a framework.

The gradient of every member is that of the same function computed in one process on all ranks' inputs, for a loss that
is the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from hyper_parallel.platform.base.unsupported import needs_framework

__all__ = ["REDUCE_OPS", "SYNC_ROLES", "DifferentiableMembers", "reduce_op_name", "sync_roles"]

REDUCE_OPS: Final[Mapping[str, str]] = MappingProxyType(
    {"sum": "sum", "avg": "avg", "mean": "avg", "max": "max", "min": "min", "prod": "prod", "all": "all"}
)
"""Every accepted name of a reduction, and the one name it goes by inside."""

SYNC_ROLES: Final[Mapping[tuple[str, str], tuple[str, str]]] = MappingProxyType(
    {
        ("forward", "A"): ("compute", "comm"),
        ("forward", "B"): ("comm", "compute"),
        ("forward", "C"): ("compute", "comm"),
        ("forward", "D"): ("comm", "compute"),
        ("backward", "D"): ("compute", "comm"),
        ("backward", "C"): ("comm", "compute"),
        ("backward", "B"): ("compute", "comm"),
        ("backward", "A"): ("comm", "compute"),
    }
)
"""(direction, hook) to (the role whose work has just been dispatched, the role that comes next)."""


def reduce_op_name(op: Any, *, member: str) -> str:
    """The inside name of a reduction; a misspelt one is refused, never guessed."""
    if not isinstance(op, str) or op not in REDUCE_OPS:
        raise ValueError(f"{member}: unknown op {op!r}; known are {', '.join(REDUCE_OPS)}")
    return REDUCE_OPS[op]


def sync_roles(direction: str, hook_name: Any) -> tuple[str, str]:
    """The (finished, next) roles of a hook; an unknown hook is refused."""
    known = [name for way, name in SYNC_ROLES if way == "forward"]
    if hook_name not in known:
        raise ValueError(f"differentiable_sync_hook: unknown hook {hook_name!r}; known are {', '.join(known)}")
    return SYNC_ROLES[direction, hook_name]


class DifferentiableMembers:
    """Moving tensors between ranks, inside the graph."""

    @staticmethod
    def differentiable_all_gather_concat(data: Any, group: Any, concat_size: int, concat_dim: int) -> Any:
        """Every rank's tensor, concatenated along ``concat_dim`` in group order."""
        raise needs_framework("differentiable_all_gather_concat")

    @staticmethod
    def differentiable_all_to_all(input_data: Any, output_shape: Any, group: Any) -> Any:
        """Equal piece r of dim 0 goes to rank r; the result has ``output_shape``."""
        raise needs_framework("differentiable_all_to_all")

    @staticmethod
    def differentiable_all_reduce(data: Any, op: str, group: Any) -> Any:
        """A new tensor with the reduction over ranks.

        The gradient of max and min goes to the ranks that hold the extremum, in equal parts where several do, as a
        reduction over one stacked tensor has it. ``all`` is logical, gives booleans, and has no gradient.
        """
        raise needs_framework("differentiable_all_reduce")

    @staticmethod
    def differentiable_reduce_scatter(data: Any, dev_num: int, axis: int, op: str, group: Any) -> Any:
        """My chunk, along ``axis``, of the reduction over ranks; every op of the all-reduce is served."""
        raise needs_framework("differentiable_reduce_scatter")

    @staticmethod
    def differentiable_all_to_all_single(input_tensor: Any, input_splits: Any, output_splits: Any, group: Any) -> Any:
        """``input_splits[r]`` rows go to rank r, ``output_splits[r]`` rows come from it; zero rows are fine."""
        raise needs_framework("differentiable_all_to_all_single")

    @staticmethod
    def differentiable_all_to_all_single_async(
        input_tensor: Any, input_splits: Any, output_splits: Any, group: Any
    ) -> Any:
        """The same; on devices with streams the host does not wait for the exchange, forward or backward."""
        raise needs_framework("differentiable_all_to_all_single_async")

    @staticmethod
    def differentiable_async_a2a_wait(
        x: Any,
        work: Any,
        out_perm: Any,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: Any = None,
    ) -> Any:
        """Finish an exchange of ``x`` that was launched before, and merge axis 0 of ``out_perm`` into ``concat_dim``.

        Without a box, backward does the reverse exchange and returns the true gradient of ``x``. With one, it launches
        the reverse exchange, appends ``(work, out_perm)`` to the box and returns zeros. The caller takes the pair out of
        the box and adds the gradient where it belongs.
        """
        raise needs_framework("differentiable_async_a2a_wait")

    @staticmethod
    def differentiable_sync_hook(x: Any, hook_name: str, coordinator: Any) -> Any:
        """The identity. Its forward and its backward wait for the other thread at the coordinator."""
        raise needs_framework("differentiable_sync_hook")

    @staticmethod
    def p2p_exchange(tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Give my tensor to a global rank and get that rank's, which has the same shape; mine if I am the peer."""
        raise needs_framework("p2p_exchange")
