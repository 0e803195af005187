"""Collectives with a gradient, on MindSpore: every argument is checked here, the work is done by the Functions."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import mindspore
from mindspore import mint

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.base.differentiable import DifferentiableMembers, reduce_op_name, sync_roles
from hyper_parallel.platform.mindspore import compat, pending, wire
from hyper_parallel.platform.mindspore.collective_functions import (
    AllGatherConcat,
    AllReduceExtremum,
    AllReduceProd,
    AllReduceSum,
    AllToAllRows,
    Exchange,
    FinishAllToAll,
    Merge,
    PeerExchange,
    ReduceScatterSum,
    SyncHook,
)
from hyper_parallel.platform.mindspore.collectives import equal_split_shape
from hyper_parallel.platform.mindspore.groups import group_ranks, live_group, my_rank, peer_in
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["MindSporeDifferentiableMembers"]


class MindSporeDifferentiableMembers(DifferentiableMembers):
    """The contract of differentiable collectives, served by our own autograd Functions."""

    @staticmethod
    def differentiable_all_gather_concat(data: Any, group: Any, concat_size: int, concat_dim: int) -> Any:
        """Every rank's tensor, concatenated along ``concat_dim`` in group order."""
        member = "differentiable_all_gather_concat"
        name = live_group(group, member=member)
        _must_be_group_size(concat_size, name, name="concat_size", member=member)
        return AllGatherConcat.apply(data, name, _dim(concat_dim, data, name="concat_dim", member=member))

    @staticmethod
    def differentiable_all_to_all(input_data: Any, output_shape: Any, group: Any) -> Any:
        """Equal piece r of dim 0 goes to rank r; the result has ``output_shape``."""
        name = live_group(group, member="differentiable_all_to_all")
        size = len(group_ranks(name))
        shape = equal_split_shape(input_data, output_shape, size, member="differentiable_all_to_all")
        counts = (input_data.shape[0] // size,) * size
        return AllToAllRows.apply(input_data, Exchange(sent=counts, received=counts, group=name)).reshape(shape)

    @staticmethod
    def differentiable_all_reduce(data: Any, op: str, group: Any) -> Any:
        """A new tensor with the reduction over ranks; ``all`` gives booleans and has no gradient."""
        reduction = reduce_op_name(op, member="differentiable_all_reduce")
        return _reduced(data, reduction, live_group(group, member="differentiable_all_reduce"))

    @staticmethod
    def differentiable_reduce_scatter(data: Any, dev_num: int, axis: int, op: str, group: Any) -> Any:
        """My chunk, along ``axis``, of the reduction over ranks."""
        member = "differentiable_reduce_scatter"
        reduction = reduce_op_name(op, member=member)
        name = live_group(group, member=member)
        _must_be_group_size(dev_num, name, name="dev_num", member=member)
        dim = _dim(axis, data, name="axis", member=member)
        _must_divide(data, dim, dev_num, member=member)
        if reduction == "sum":
            return ReduceScatterSum.apply(data, name, dim)
        if reduction == "avg":
            _must_be_floating(data, member=member)
            return ReduceScatterSum.apply(data, name, dim) / dev_num
        # Backends scatter no other reduction everywhere; my chunk of the whole reduction is the same function.
        rows = data.shape[dim] // dev_num
        start = group_ranks(name).index(my_rank()) * rows
        return _reduced(data, reduction, name).narrow(dim, start, rows).contiguous()

    @staticmethod
    def differentiable_all_to_all_single(input_tensor: Any, input_splits: Any, output_splits: Any, group: Any) -> Any:
        """``input_splits[r]`` rows go to rank r, ``output_splits[r]`` rows come from it; zero rows are fine."""
        member = "differentiable_all_to_all_single"
        return _exchange_rows(input_tensor, input_splits, output_splits, group, member=member)

    @staticmethod
    def differentiable_all_to_all_single_async(
        input_tensor: Any, input_splits: Any, output_splits: Any, group: Any
    ) -> Any:
        """The same; on Ascend the host does not wait for the exchange, on the CPU it does."""
        member = "differentiable_all_to_all_single_async"
        return _exchange_rows(input_tensor, input_splits, output_splits, group, member=member)

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
        """Finish an exchange of ``x`` that was launched before, and merge axis 0 of ``out_perm`` into ``concat_dim``."""
        member = "differentiable_async_a2a_wait"
        name = live_group(group, member=member)
        _must_be_group_size(world_size, name, name="world_size", member=member)
        concat = _dim(concat_dim, x, name="concat_dim", member=member)
        split = _dim(split_dim, x, name="split_dim", member=member)
        _must_divide(x, split, world_size, member=member)
        expected = [world_size, *x.shape]
        expected[1 + split] //= world_size
        if list(out_perm.shape) != expected:
            raise ValueError(
                f"{member}: cannot merge out_perm of shape {tuple(out_perm.shape)}; because an exchange of "
                f"{tuple(x.shape)} split along dim {split} among {world_size} ranks has shape {tuple(expected)}; "
                "give the output of that exchange"
            )
        merge = Merge(
            work=work, out_perm=out_perm, group=name, concat_dim=concat, split_dim=split, handle_box=handle_box
        )
        return FinishAllToAll.apply(x, merge)

    @staticmethod
    def differentiable_sync_hook(x: Any, hook_name: str, coordinator: Any) -> Any:
        """The identity; on its way forward and backward it meets the other thread through the coordinator."""
        sync_roles("forward", hook_name)
        _refuse_second_thread(coordinator)
        return SyncHook.apply(x, hook_name, coordinator)

    @staticmethod
    def p2p_exchange(tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Give my tensor to a global rank and get that rank's; mine if I am the peer."""
        name = live_group(group, member="p2p_exchange")
        peer = peer_in(name, peer_rank, member="p2p_exchange")
        if peer == my_rank():
            return tensor
        return PeerExchange.apply(tensor, peer, name)


def _reduced(data: Any, op: str, group: str) -> Any:
    if op == "sum":
        return AllReduceSum.apply(data, group)
    if op == "avg":
        _must_be_floating(data, member="differentiable_all_reduce")
        return AllReduceSum.apply(data, group) / len(group_ranks(group))
    if op in ("max", "min"):
        return AllReduceExtremum.apply(data, op, group)
    if op == "prod":
        return AllReduceProd.apply(data, group)
    # Backends reduce no booleans; the smallest of zeros and ones is the logical and.
    pending.flush()
    with compat.no_grad():
        flags = mint.ne(detached(data).to(mindspore.float32), 0).to(mindspore.int32).contiguous()
        return wire.all_reduced(flags, "min", group).to(mindspore.bool_)


def _exchange_rows(data: Any, input_splits: Any, output_splits: Any, group: Any, *, member: str) -> Any:
    name = live_group(group, member=member)
    size = len(group_ranks(name))
    if data.ndim == 0:
        raise ValueError(f"{member}: a scalar has no rows to exchange; give a tensor with at least one dim")
    sent = _row_counts(input_splits, data.shape[0], size, name="input_splits", member=member)
    received = _row_counts(output_splits, data.shape[0], size, name="output_splits", member=member)
    if sum(sent) != data.shape[0]:
        raise ValueError(
            f"{member}: input_splits {list(sent)} name {sum(sent)} rows, but the tensor has {data.shape[0]}; "
            "they must add up to dim 0"
        )
    return AllToAllRows.apply(data, Exchange(sent=sent, received=received, group=name))


def _row_counts(splits: Any, rows: int, size: int, *, name: str, member: str) -> tuple[int, ...]:
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{member}: {name}=None means equal pieces, but {rows} rows do not divide among {size} ranks; "
                "give one count per rank"
            )
        return (rows // size,) * size
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0:
        raise ValueError(f"{member}: {name}={counts} must be {size} counts, one per rank of the group, none negative")
    return tuple(counts)


def _dim(dim: int, data: Any, *, name: str, member: str) -> int:
    if not -data.ndim <= dim < data.ndim:
        raise ValueError(
            f"{member}: {name}={dim} is not a dim of shape {tuple(data.shape)}; "
            f"give a number between {-data.ndim} and {data.ndim - 1}"
            if data.ndim
            else f"{member}: {name}={dim} is not a dim of a scalar; give a tensor with at least one dim"
        )
    return dim % int(data.ndim)


def _must_be_group_size(given: int, group: str, *, name: str, member: str) -> None:
    size = len(group_ranks(group))
    if given != size:
        raise ValueError(f"{member}: {name}={given} must be the group's size, which is {size}")


def _must_divide(data: Any, dim: int, size: int, *, member: str) -> None:
    if data.shape[dim] % size:
        raise ValueError(
            f"{member}: cannot split dim {dim} of shape {tuple(data.shape)} among {size} ranks; because it does not "
            f"divide; pad it to a multiple of {size}"
        )


def _must_be_floating(data: Any, *, member: str) -> None:
    if not (data.is_floating_point() or data.is_complex()):
        raise ValueError(f"{member}: cannot average {data.dtype}; because it has no fractions; cast it, or use 'sum'")


_THREAD_OF: Final[weakref.WeakKeyDictionary[Any, threading.Thread]] = weakref.WeakKeyDictionary()
"""Coordinator -> the thread whose hooks used it."""


def _refuse_second_thread(coordinator: Any) -> None:
    """Raise where two living threads use one coordinator: two gradients at once can end a process of MindSpore."""
    this, first = threading.current_thread(), _THREAD_OF.get(coordinator)
    if first is None or not first.is_alive():
        _THREAD_OF[coordinator] = first = this
    is_enabled = getattr(coordinator, "is_enabled", None)
    if first is this or (is_enabled is not None and not is_enabled()):
        return
    if is_enabled is not None:
        coordinator.disable()  # the first thread may be waiting for this one
    raise UnsupportedMemberError(
        member="differentiable_sync_hook",
        platform="MindSporePlatform",
        reason=f"the threads {first.name!r} and {this.name!r} share a coordinator, and MindSpore's autograd is not safe in two "
        "threads at once: it can end the process. The coordinator was disabled, so that no thread waits",
        instead="run the two halves one after the other in one thread, with the coordinator disabled",
    )
