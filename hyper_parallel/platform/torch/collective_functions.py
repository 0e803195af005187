"""The autograd Functions behind the differentiable collectives.

Three rules hold in this module. Everything that is sent is made contiguous first, because backends send memory in
storage order and a gradient may arrive with any strides. Every backward is made of Functions of this module, so second
derivatives are right too. Every gradient is that of one process which holds all inputs and adds up all ranks' losses;
so the adjoint of a gather is a reduce-scatter, of an exchange the reverse exchange, of a sum over ranks the same sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.base.differentiable import sync_roles
from hyper_parallel.platform.torch import compat

__all__ = [
    "AllGatherConcat",
    "AllReduceExtremum",
    "AllReduceProd",
    "AllReduceSum",
    "AllToAllRows",
    "FinishAllToAll",
    "PeerExchange",
    "ReduceScatterSum",
    "SyncHook",
    "applied",
]


def applied(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """``function.apply``, which torch leaves untyped; every Function of this module returns one tensor."""
    output: torch.Tensor = function.apply(*arguments)
    return output


class AllGatherConcat(torch.autograd.Function):
    """Every rank's tensor, side by side along one dim; the adjoint of :class:`ReduceScatterSum`."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        """Gather along dim 0, which backends know, then lay the pieces along ``dim``."""
        ctx.group, ctx.dim = group, dim
        size = dist.get_world_size(group)
        dense = data.contiguous()
        gathered = dense.new_empty((size * dense.shape[0], *dense.shape[1:]))
        compat.all_gather_single(gathered, dense, group=group)
        return gathered if dim == 0 else torch.cat(gathered.tensor_split(size, 0), dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """My piece of the sum of all ranks' gradients."""
        return applied(ReduceScatterSum, grad, ctx.group, ctx.dim), None, None


class ReduceScatterSum(torch.autograd.Function):
    """My piece, along one dim, of the sum over ranks; the adjoint of :class:`AllGatherConcat`."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        """Lay the pieces along dim 0, which backends know, then reduce and scatter."""
        ctx.group, ctx.dim = group, dim
        size = dist.get_world_size(group)
        pieces = data.tensor_split(size, dim)
        stacked = data.contiguous() if dim == 0 else torch.cat(pieces, 0)
        output = data.new_empty(pieces[0].shape)
        compat.reduce_scatter_single(output, stacked, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Every rank's gradient, each in its own piece."""
        return applied(AllGatherConcat, grad, ctx.group, ctx.dim), None, None


class AllReduceSum(torch.autograd.Function):
    """The sum over ranks, its own adjoint."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduce a copy; the input stays."""
        ctx.group = group
        return _all_reduced(data, dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Every rank's loss depends on my input, so all gradients add up."""
        return applied(AllReduceSum, grad, ctx.group), None


class AllReduceExtremum(torch.autograd.Function):
    """The largest or smallest over ranks; its gradient goes to the ranks that hold it, in equal parts."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, is_max: bool, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduce a copy; keep input and result, which tell in backward who holds the extremum."""
        ctx.group = group
        extremum = _all_reduced(data, dist.ReduceOp.MAX if is_max else dist.ReduceOp.MIN, group)
        ctx.save_for_backward(data, extremum)
        return extremum

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The gradients' sum, shared among the holders, as ``amax`` shares it over one stacked tensor."""
        data, extremum = ctx.saved_tensors
        holds = (data == extremum).detach()
        holders = _all_reduced(holds.to(torch.int32), dist.ReduceOp.SUM, ctx.group)
        return applied(AllReduceSum, grad, ctx.group) * holds / holders, None, None


class AllReduceProd(torch.autograd.Function):
    """The product over ranks; right also where some factors are zero."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Reduce a copy; keep the input, which backward gathers."""
        ctx.group = group
        ctx.save_for_backward(data)
        return _all_reduced(data, dist.ReduceOp.PRODUCT, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The gradients' sum times the product of the *other* ranks' factors.

        The factors are gathered and multiplied without mine: dividing the product by my factor would fail on zeros and
        where the product over- or underflows.
        """
        (data,) = ctx.saved_tensors
        me = dist.get_rank(ctx.group)
        factors = applied(AllGatherConcat, data.unsqueeze(0), ctx.group, 0)
        others = torch.cat((factors[:me], factors[me + 1 :])).prod(0)
        return applied(AllReduceSum, grad, ctx.group) * others, None


class AllToAllRows(torch.autograd.Function):
    """Rows to every rank, rows from every rank; its adjoint is itself with the counts exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        data: torch.Tensor,
        input_splits: list[int],
        output_splits: list[int],
        group: dist.ProcessGroup,
        is_async: bool,
    ) -> torch.Tensor:
        """Exchange rows of dim 0."""
        ctx.splits, ctx.group, ctx.is_async = (input_splits, output_splits), group, is_async
        dense = data.contiguous()
        output = dense.new_empty((sum(output_splits), *dense.shape[1:]))
        work = dist.all_to_all_single(output, dense, output_splits, input_splits, group=group, async_op=is_async)
        if work is not None:
            # On a device this orders the current stream after the exchange and lets the host go on.
            work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The reverse exchange."""
        input_splits, output_splits = ctx.splits
        reverse = applied(AllToAllRows, grad, output_splits, input_splits, ctx.group, ctx.is_async)
        return reverse, None, None, None, None


class FinishAllToAll(torch.autograd.Function):
    """The second half of an exchange whose first half was launched outside the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        work: Any,  # a c10d Work, or None when the exchange has ended
        out_perm: torch.Tensor,
        group: dist.ProcessGroup,
        dims: tuple[int, int],
        handle_box: Any,  # anything with append, or None
    ) -> torch.Tensor:
        """Wait, then lay what came from rank 0, 1, ... side by side along the concat dim."""
        ctx.group, ctx.dims, ctx.handle_box = group, dims, handle_box
        if work is not None:
            work.wait()
        return torch.cat(out_perm.unbind(0), dims[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The reverse exchange: launched and put into the box, or done here when there is none."""
        concat_dim, split_dim = ctx.dims
        size = dist.get_world_size(ctx.group)
        pieces = torch.stack(grad.tensor_split(size, concat_dim))
        if ctx.handle_box is None:
            ones = [1] * size
            received = applied(AllToAllRows, pieces, ones, ones, ctx.group, False)
            return torch.cat(received.unbind(0), split_dim), None, None, None, None, None
        received = torch.empty_like(pieces)
        work = dist.all_to_all_single(received, pieces, group=ctx.group, async_op=True)
        ctx.handle_box.append((work, received))
        shape = list(pieces.shape[1:])
        shape[split_dim] *= size
        return grad.new_zeros(shape), None, None, None, None, None


class SyncHook(torch.autograd.Function):
    """The identity, which tells a coordinator where this thread is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hook_name: str, coordinator: Any) -> torch.Tensor:  # a HookCoordinator
        """Say what has been dispatched, then meet the other thread."""
        ctx.hook_name, ctx.coordinator = hook_name, coordinator
        _meet(coordinator, sync_roles("forward", hook_name))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The same on the way back, with the backward's roles."""
        _meet(ctx.coordinator, sync_roles("backward", ctx.hook_name))
        return grad, None, None


class PeerExchange(torch.autograd.Function):
    """My tensor for the peer's; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, peer: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Send and receive as one batch, so that neither side waits for the other to begin."""
        ctx.peer, ctx.group = peer, group
        dense = data.contiguous()
        received = torch.empty_like(dense)
        both = [dist.P2POp(dist.isend, dense, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """The peer's gradient is the gradient of what I sent."""
        return applied(PeerExchange, grad, ctx.peer, ctx.group), None, None


def _all_reduced(data: torch.Tensor, op: Any, group: dist.ProcessGroup) -> torch.Tensor:  # a c10d ReduceOp
    copy = data.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(copy, op=op, group=group)
    return copy


def _meet(coordinator: Any, roles: tuple[str, str]) -> None:
    finished, following = roles
    coordinator.notify_dispatched(finished)
    coordinator.rendezvous(following)
