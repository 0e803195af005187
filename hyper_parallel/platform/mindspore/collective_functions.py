"""The autograd Functions behind the differentiable collectives.

Everything that is sent is made dense first, and everything that was launched before is run first. Every gradient is
that of one process which holds all inputs and adds up all ranks' losses; so the adjoint of a gather is a
reduce-scatter, of an exchange the reverse exchange, of a sum over ranks the same sum. MindSpore records nothing inside
a Function's backward, so second derivatives do not pass through a collective.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mindspore
from mindspore import mint

from hyper_parallel.platform.base.differentiable import sync_roles
from hyper_parallel.platform.mindspore import pending, wire
from hyper_parallel.platform.mindspore.compat import Function
from hyper_parallel.platform.mindspore.groups import group_ranks, my_rank

__all__ = [
    "AllGatherConcat",
    "AllReduceExtremum",
    "AllReduceProd",
    "AllReduceSum",
    "AllToAllRows",
    "Exchange",
    "FinishAllToAll",
    "Merge",
    "PeerExchange",
    "ReduceScatterSum",
    "SyncHook",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """Who sends how many rows to whom, in group order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge:
    """The second half of an exchange."""

    work: Any  # a handle, or None when the exchange has ended
    out_perm: Any  # mindspore.Tensor
    group: str
    concat_dim: int
    split_dim: int
    handle_box: Any  # anything with append, or None


def _gather_concat(data: Any, group: str, dim: int) -> Any:
    pending.flush()
    return mint.cat(wire.gathered(data.contiguous(), group), dim)


def _sum_scatter(data: Any, group: str, dim: int) -> Any:
    pending.flush()
    size = len(group_ranks(group))
    stacked = data.contiguous() if dim == 0 else mint.cat(mint.split(data, data.shape[dim] // size, dim), 0)
    return wire.summed_chunk(stacked.contiguous(), group)


def _reduce(data: Any, op: str, group: str) -> Any:
    pending.flush()
    return wire.all_reduced(data.contiguous(), op, group)


def _exchange(data: Any, sent: tuple[int, ...], received: tuple[int, ...], group: str) -> Any:
    pending.flush()
    return wire.exchanged_rows(data.contiguous(), list(sent), list(received), group)


class AllGatherConcat(Function):  # type: ignore[misc]
    """Every rank's tensor, side by side along one dim; the adjoint of :class:`ReduceScatterSum`."""

    @staticmethod
    def forward(ctx: Any, data: Any, group: str, dim: int) -> Any:
        """Gather the pieces, then lay them along ``dim``."""
        ctx.group, ctx.dim = group, dim
        return _gather_concat(data, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """My piece of the sum of all ranks' gradients."""
        return _sum_scatter(grad, ctx.group, ctx.dim), None, None


class ReduceScatterSum(Function):  # type: ignore[misc]
    """My piece, along one dim, of the sum over ranks; the adjoint of :class:`AllGatherConcat`."""

    @staticmethod
    def forward(ctx: Any, data: Any, group: str, dim: int) -> Any:
        """Lay the pieces along dim 0, then reduce and scatter."""
        ctx.group, ctx.dim = group, dim
        return _sum_scatter(data, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Every rank's gradient, each in its own piece."""
        return _gather_concat(grad, ctx.group, ctx.dim), None, None


class AllReduceSum(Function):  # type: ignore[misc]
    """The sum over ranks, its own adjoint."""

    @staticmethod
    def forward(ctx: Any, data: Any, group: str) -> Any:
        """Reduce a copy; the input stays."""
        ctx.group = group
        return _reduce(data, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """Every rank's loss depends on my input, so all gradients add up."""
        return _reduce(grad, "sum", ctx.group), None


class AllReduceExtremum(Function):  # type: ignore[misc]
    """The largest or smallest over ranks; its gradient goes to the ranks that hold it, in equal parts."""

    @staticmethod
    def forward(ctx: Any, data: Any, op: str, group: str) -> Any:
        """Reduce a copy; keep input and result, which tell in backward who holds the extremum."""
        ctx.group = group
        extremum = _reduce(data, op, group)
        ctx.save_for_backward(data, extremum)
        return extremum

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The gradients' sum, shared among the holders, as a maximum over one stacked tensor shares it."""
        data, extremum = ctx.saved_tensors
        holds = (data == extremum).to(mindspore.int32)
        holders = _reduce(holds, "sum", ctx.group)
        share = holds.to(grad.dtype) / holders.to(grad.dtype)
        return _reduce(grad, "sum", ctx.group) * share, None, None


class AllReduceProd(Function):  # type: ignore[misc]
    """The product over ranks; right also where some factors are zero."""

    @staticmethod
    def forward(ctx: Any, data: Any, group: str) -> Any:
        """Reduce a copy; keep the input, which backward gathers."""
        ctx.group = group
        ctx.save_for_backward(data)
        return _reduce(data, "prod", group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The gradients' sum times the product of the *other* ranks' factors; division would fail on zeros."""
        (data,) = ctx.saved_tensors
        pending.flush()
        factors = wire.gathered(data.contiguous(), ctx.group)
        result = _reduce(grad, "sum", ctx.group)
        me = group_ranks(ctx.group).index(my_rank())
        for place, factor in enumerate(factors):
            result = result if place == me else result * factor
        return result, None


class AllToAllRows(Function):  # type: ignore[misc]
    """Rows to every rank, rows from every rank; its adjoint is itself with the counts exchanged."""

    @staticmethod
    def forward(ctx: Any, data: Any, exchange: Exchange) -> Any:
        """Exchange rows of dim 0."""
        ctx.exchange = exchange
        return _exchange(data, exchange.sent, exchange.received, exchange.group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The reverse exchange."""
        exchange: Exchange = ctx.exchange
        return _exchange(grad, exchange.received, exchange.sent, exchange.group), None


class FinishAllToAll(Function):  # type: ignore[misc]
    """The second half of an exchange whose first half was launched outside the graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, merge: Merge) -> Any:
        """Wait, then lay what came from rank 0, 1, ... side by side along the concat dim."""
        ctx.merge = merge
        if merge.work is not None:
            merge.work.wait()
        return mint.cat(_rows(merge.out_perm), merge.concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The reverse exchange: launched and put into the box, or done here when there is none."""
        from hyper_parallel.platform.mindspore.collectives import MindSporeCollectiveMembers

        merge: Merge = ctx.merge
        size = len(group_ranks(merge.group))
        width = grad.shape[merge.concat_dim] // size
        parts = mint.split(grad, width, merge.concat_dim)
        pieces = mint.cat([part.contiguous().reshape(1, *part.shape) for part in parts], 0)
        if merge.handle_box is None:
            ones = (1,) * size
            return mint.cat(_rows(_exchange(pieces, ones, ones, merge.group)), merge.split_dim), None
        received, work = MindSporeCollectiveMembers.all_to_all_single(
            pieces, tuple(pieces.shape), merge.group, async_op=True
        )
        merge.handle_box.append((work, received))
        shape = list(pieces.shape[1:])
        shape[merge.split_dim] *= size
        return mint.zeros(tuple(shape), dtype=grad.dtype), None


class SyncHook(Function):  # type: ignore[misc]
    """The identity, which tells a coordinator where this thread is."""

    @staticmethod
    def forward(ctx: Any, x: Any, hook_name: str, coordinator: Any) -> Any:  # a HookCoordinator
        """Say what has been dispatched, then meet the other thread."""
        ctx.hook_name, ctx.coordinator = hook_name, coordinator
        _meet(coordinator, sync_roles("forward", hook_name))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The same on the way back, with the backward's roles."""
        _meet(ctx.coordinator, sync_roles("backward", ctx.hook_name))
        return grad, None, None


class PeerExchange(Function):  # type: ignore[misc]
    """My tensor for the peer's; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, data: Any, peer: int, group: str) -> Any:
        """Send, then receive; sending does not wait for the other side."""
        ctx.peer, ctx.group = peer, group
        pending.flush()
        return wire.exchanged_with(data.contiguous(), peer, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        """The peer's gradient is the gradient of what I sent."""
        pending.flush()
        return wire.exchanged_with(grad.contiguous(), ctx.peer, ctx.group), None, None


def _rows(tensor: Any) -> list[Any]:
    return [tensor[place] for place in range(tensor.shape[0])]


def _meet(coordinator: Any, roles: tuple[str, str]) -> None:
    finished, following = roles
    coordinator.notify_dispatched(finished)
    coordinator.rendezvous(following)
