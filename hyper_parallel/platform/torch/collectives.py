"""Collectives without a gradient, on ``torch.distributed``.

Backends send memory in storage order, so everything is made contiguous first. Where a result must land in a tensor that
is not contiguous, a dense copy travels and is copied back: at once, or in the handle's ``wait``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.base.collectives import CollectiveMembers
from hyper_parallel.platform.torch import compat
from hyper_parallel.platform.torch.groups import live_group, peer_in

__all__ = ["CopyBackWork", "TorchCollectiveMembers"]


class CopyBackWork:
    """A work handle whose ``wait`` also copies the dense buffer into the strided tensor it stands for."""

    def __init__(self, work: Any, target: torch.Tensor, buffer: torch.Tensor) -> None:  # Any: a c10d Work
        self._work = work
        self._target = target
        self._buffer: torch.Tensor | None = buffer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective, then copy; a second wait copies nothing."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        if self._buffer is not None:
            _copy_into(self._target, self._buffer)
            self._buffer = None
        return bool(done)

    def is_completed(self) -> bool:
        """Whether the collective has ended; the tensor is filled by :meth:`wait`."""
        return bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    # A collective writes below autograd; a leaf that requires grad must not be refused only for its strides.
    with torch.no_grad():
        target.copy_(source)


def _writable(data: torch.Tensor, *, member: str) -> torch.Tensor:
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride()))
    if overlaps:
        raise ValueError(
            f"{member}: cannot write into an expanded tensor of shape {tuple(data.shape)} and strides {data.stride()}; "
            "because several of its elements are one memory location; give data.contiguous()"
        )
    return data if data.is_contiguous() else data.contiguous()


def _in_place(
    launch: Callable[[torch.Tensor], Any], data: torch.Tensor, *, member: str, async_op: bool
) -> torch.Tensor | tuple[torch.Tensor, Any]:
    plain = data.detach()
    dense = _writable(plain, member=member)
    work = launch(dense)
    is_copy = dense is not plain
    if async_op:
        return data, CopyBackWork(work, data, dense) if is_copy else work
    if is_copy:
        _copy_into(data, dense)
    return data


class TorchCollectiveMembers(CollectiveMembers):
    """The contract of plain collectives, served by ``torch.distributed``."""

    @staticmethod
    def all_gather_into_tensor(data: torch.Tensor, group_info: Any, async_op: bool = False) -> Any:
        """Every rank's tensor, concatenated along dim 0 in group order; ``(tensor, handle)`` when async."""
        group = live_group(group_info, member="all_gather_into_tensor")
        dense = data.detach().contiguous()
        rows = dense.shape[0] if dense.dim() else 1
        output = dense.new_empty((rows * dist.get_world_size(group), *dense.shape[1:]))
        work = compat.all_gather_single(output, dense, group=group, async_op=async_op)
        return (output, work) if async_op else output

    @staticmethod
    def reduce_scatter_tensor(data: torch.Tensor, group_info: Any, async_op: bool = False) -> Any:
        """My chunk of dim 0 of the sum over ranks; ``(tensor, handle)`` when async."""
        group = live_group(group_info, member="reduce_scatter_tensor")
        size = dist.get_world_size(group)
        if data.dim() == 0 or data.shape[0] % size:
            raise ValueError(
                f"reduce_scatter_tensor: cannot scatter shape {tuple(data.shape)} over {size} ranks; "
                f"because dim 0 does not divide; pad it to a multiple of {size}"
            )
        dense = data.detach().contiguous()
        output = dense.new_empty((dense.shape[0] // size, *dense.shape[1:]))
        work = compat.reduce_scatter_single(output, dense, group=group, async_op=async_op)
        return (output, work) if async_op else output

    @staticmethod
    def all_reduce(data: torch.Tensor, group_info: Any, async_op: bool = False) -> Any:
        """The sum over ranks, in place on ``data``; ``(data, handle)`` when async."""
        group = live_group(group_info, member="all_reduce")
        return _in_place(
            lambda dense: dist.all_reduce(dense, group=group, async_op=async_op),
            data,
            member="all_reduce",
            async_op=async_op,
        )

    @staticmethod
    def all_to_all_single(
        input_tensor: torch.Tensor, output_shape: Any, group: Any, async_op: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Piece r of dim 0 goes to rank r; always ``(output, work)``, where work is None unless async."""
        handle = live_group(group, member="all_to_all_single")
        shape = equal_split_shape(input_tensor, output_shape, dist.get_world_size(handle), member="all_to_all_single")
        dense = input_tensor.detach().contiguous()
        output = dense.new_empty(shape)
        work = dist.all_to_all_single(output, dense, group=handle, async_op=async_op)
        return output, work if async_op else None

    @staticmethod
    def broadcast(data: torch.Tensor, src: int, group: Any, async_op: bool = False) -> Any:
        """The tensor of global rank ``src``, in place on ``data``; ``(data, handle)`` when async."""
        handle = live_group(group, member="broadcast")
        src = peer_in(handle, src, member="broadcast")
        return _in_place(
            lambda dense: dist.broadcast(dense, src=src, group=handle, async_op=async_op),
            data,
            member="broadcast",
            async_op=async_op,
        )

    @staticmethod
    def isend(tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start sending to a global rank; returns the work handle."""
        handle = live_group(group, member="isend")
        dst = peer_in(handle, dst, member="isend")
        return dist.isend(tensor.detach().contiguous(), dst=dst, group=handle, tag=tag)

    @staticmethod
    def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from a global rank, or from any; returns the work handle."""
        handle = live_group(group, member="irecv")
        if src is not None:
            src = peer_in(handle, src, member="irecv")
        _, work = _in_place(
            lambda dense: dist.irecv(dense, src=src, group=handle, tag=tag), tensor, member="irecv", async_op=True
        )
        return work


def equal_split_shape(data: torch.Tensor, output_shape: Any, size: int, *, member: str) -> tuple[int, ...]:
    """The output shape of an exchange of equal pieces of dim 0, refused when the pieces do not fit."""
    shape = (output_shape,) if isinstance(output_shape, int) else tuple(int(length) for length in output_shape)
    fits = data.dim() and shape and not data.shape[0] % size and not shape[0] % size
    if not fits or math.prod(shape) != data.numel():
        raise ValueError(
            f"{member}: cannot exchange shape {tuple(data.shape)} into {shape} among {size} ranks; because both need "
            f"dim 0 divisible by {size} and as many elements as each other; use differentiable_all_to_all_single for "
            "unequal pieces"
        )
    return shape
