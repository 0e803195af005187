"""Collectives with a gradient, on torch: every argument is checked here, the work is done by the autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.base.differentiable import DifferentiableMembers, reduce_op_name, sync_roles
from hyper_parallel.platform.torch.collective_functions import (
    AllGatherConcat,
    AllReduceExtremum,
    AllReduceProd,
    AllReduceSum,
    AllToAllRows,
    FinishAllToAll,
    PeerExchange,
    ReduceScatterSum,
    SyncHook,
    applied,
)
from hyper_parallel.platform.torch.collectives import equal_split_shape
from hyper_parallel.platform.torch.groups import live_group, peer_in

__all__ = ["TorchDifferentiableMembers"]


class TorchDifferentiableMembers(DifferentiableMembers):
    """The contract of differentiable collectives, served by our own autograd Functions."""

    @staticmethod
    def differentiable_all_gather_concat(
        data: torch.Tensor, group: Any, concat_size: int, concat_dim: int
    ) -> torch.Tensor:
        """Every rank's tensor, concatenated along ``concat_dim`` in group order."""
        member = "differentiable_all_gather_concat"
        handle = live_group(group, member=member)
        _must_be_group_size(concat_size, handle, name="concat_size", member=member)
        return applied(AllGatherConcat, data, handle, _dim(concat_dim, data, name="concat_dim", member=member))

    @staticmethod
    def differentiable_all_to_all(input_data: torch.Tensor, output_shape: Any, group: Any) -> torch.Tensor:
        """Equal piece r of dim 0 goes to rank r; the result has ``output_shape``."""
        handle = live_group(group, member="differentiable_all_to_all")
        size = dist.get_world_size(handle)
        shape = equal_split_shape(input_data, output_shape, size, member="differentiable_all_to_all")
        splits = [input_data.shape[0] // size] * size
        return applied(AllToAllRows, input_data, splits, splits, handle, False).reshape(shape)

    @staticmethod
    def differentiable_all_reduce(data: torch.Tensor, op: str, group: Any) -> torch.Tensor:
        """A new tensor with the reduction over ranks; ``all`` gives booleans and has no gradient."""
        name = reduce_op_name(op, member="differentiable_all_reduce")
        return _reduced(data, name, live_group(group, member="differentiable_all_reduce"))

    @staticmethod
    def differentiable_reduce_scatter(data: torch.Tensor, dev_num: int, axis: int, op: str, group: Any) -> torch.Tensor:
        """My chunk, along ``axis``, of the reduction over ranks."""
        member = "differentiable_reduce_scatter"
        name = reduce_op_name(op, member=member)
        handle = live_group(group, member=member)
        _must_be_group_size(dev_num, handle, name="dev_num", member=member)
        dim = _dim(axis, data, name="axis", member=member)
        _must_divide(data, dim, dev_num, member=member)
        if name == "sum":
            return applied(ReduceScatterSum, data, handle, dim)
        if name == "avg":
            _must_be_floating(data, member=member)
            return applied(ReduceScatterSum, data, handle, dim) / dev_num
        # Backends scatter no other reduction everywhere; my chunk of the whole reduction is the same function.
        return _reduced(data, name, handle).tensor_split(dev_num, dim)[dist.get_rank(handle)].contiguous()

    @staticmethod
    def differentiable_all_to_all_single(
        input_tensor: torch.Tensor, input_splits: Any, output_splits: Any, group: Any
    ) -> torch.Tensor:
        """``input_splits[r]`` rows go to rank r, ``output_splits[r]`` rows come from it; zero rows are fine."""
        return _exchange_rows(input_tensor, input_splits, output_splits, group, is_async=False)

    @staticmethod
    def differentiable_all_to_all_single_async(
        input_tensor: torch.Tensor, input_splits: Any, output_splits: Any, group: Any
    ) -> torch.Tensor:
        """The same; on devices with streams the host does not wait for the exchange, forward or backward."""
        return _exchange_rows(input_tensor, input_splits, output_splits, group, is_async=True)

    @staticmethod
    def differentiable_async_a2a_wait(
        x: torch.Tensor,
        work: Any,
        out_perm: torch.Tensor,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: Any = None,
    ) -> torch.Tensor:
        """Finish an exchange of ``x`` that was launched before, and merge axis 0 of ``out_perm`` into ``concat_dim``."""
        member = "differentiable_async_a2a_wait"
        handle = live_group(group, member=member)
        _must_be_group_size(world_size, handle, name="world_size", member=member)
        dims = (
            _dim(concat_dim, x, name="concat_dim", member=member),
            _dim(split_dim, x, name="split_dim", member=member),
        )
        _must_divide(x, dims[1], world_size, member=member)
        expected = [world_size, *x.shape]
        expected[1 + dims[1]] //= world_size
        if list(out_perm.shape) != expected:
            raise ValueError(
                f"{member}: cannot merge out_perm of shape {tuple(out_perm.shape)}; because an exchange of "
                f"{tuple(x.shape)} split along dim {dims[1]} among {world_size} ranks has shape {tuple(expected)}; "
                "give the output of that exchange"
            )
        return applied(FinishAllToAll, x, work, out_perm, handle, dims, handle_box)

    @staticmethod
    def differentiable_sync_hook(x: torch.Tensor, hook_name: str, coordinator: Any) -> torch.Tensor:
        """The identity; on its way forward and backward it meets the other thread through the coordinator."""
        sync_roles("forward", hook_name)
        return applied(SyncHook, x, hook_name, coordinator)

    @staticmethod
    def p2p_exchange(tensor: torch.Tensor, peer_rank: int, group: Any = None) -> torch.Tensor:
        """Give my tensor to a global rank and get that rank's; mine if I am the peer."""
        handle = live_group(group, member="p2p_exchange")
        peer = peer_in(handle, peer_rank, member="p2p_exchange")
        if peer == dist.get_rank():
            return tensor
        return applied(PeerExchange, tensor, peer, handle)


def _reduced(data: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    if op == "sum":
        return applied(AllReduceSum, data, group)
    if op == "avg":
        _must_be_floating(data, member="differentiable_all_reduce")
        return applied(AllReduceSum, data, group) / dist.get_world_size(group)
    if op in ("max", "min"):
        return applied(AllReduceExtremum, data, op == "max", group)
    if op == "prod":
        return applied(AllReduceProd, data, group)
    # Backends reduce no booleans; the smallest of zeros and ones is the logical and.
    flags = data.detach().bool().to(torch.int32, memory_format=torch.contiguous_format)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    return flags.bool()


def _exchange_rows(
    data: torch.Tensor, input_splits: Any, output_splits: Any, group: Any, *, is_async: bool
) -> torch.Tensor:
    member = "differentiable_all_to_all_single" + ("_async" if is_async else "")
    handle = live_group(group, member=member)
    size = dist.get_world_size(handle)
    if data.dim() == 0:
        raise ValueError(f"{member}: a scalar has no rows to exchange; give a tensor with at least one dim")
    sent = _row_counts(input_splits, data.shape[0], size, name="input_splits", member=member)
    received = _row_counts(output_splits, data.shape[0], size, name="output_splits", member=member)
    if sum(sent) != data.shape[0]:
        raise ValueError(
            f"{member}: input_splits {sent} name {sum(sent)} rows, but the tensor has {data.shape[0]}; "
            "they must add up to dim 0"
        )
    return applied(AllToAllRows, data, sent, received, handle, is_async)


def _row_counts(splits: Any, rows: int, size: int, *, name: str, member: str) -> list[int]:
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{member}: {name}=None means equal pieces, but {rows} rows do not divide among {size} ranks; "
                "give one count per rank"
            )
        return [rows // size] * size
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{member}: {name}={counts} must be {size} counts, one per rank of the group, none negative")
    return counts


def _dim(dim: int, data: torch.Tensor, *, name: str, member: str) -> int:
    if not -data.dim() <= dim < data.dim():
        raise ValueError(
            f"{member}: {name}={dim} is not a dim of shape {tuple(data.shape)}; "
            f"give a number between {-data.dim()} and {data.dim() - 1}"
            if data.dim()
            else f"{member}: {name}={dim} is not a dim of a scalar; give a tensor with at least one dim"
        )
    return dim % data.dim()


def _must_be_group_size(given: int, group: dist.ProcessGroup, *, name: str, member: str) -> None:
    size = dist.get_world_size(group)
    if given != size:
        raise ValueError(f"{member}: {name}={given} must be the group's size, which is {size}")


def _must_divide(data: torch.Tensor, dim: int, size: int, *, member: str) -> None:
    if data.shape[dim] % size:
        raise ValueError(
            f"{member}: cannot split dim {dim} of shape {tuple(data.shape)} among {size} ranks; because it does not "
            f"divide; pad it to a multiple of {size}"
        )


def _must_be_floating(data: torch.Tensor, *, member: str) -> None:
    if not (data.is_floating_point() or data.is_complex()):
        raise ValueError(f"{member}: cannot average {data.dtype}; because it has no fractions; cast it, or use 'sum'")
