"""Collectives without a gradient, on MindSpore.

A collective is made of two steps: what travels is computed from dense tensors (:mod:`.wire`), then written into the
tensor that the caller holds, whatever its strides. Both steps run at once, or when the handle is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspore import mint

from hyper_parallel.platform.base.collectives import CollectiveMembers
from hyper_parallel.platform.mindspore import compat, pending, wire
from hyper_parallel.platform.mindspore.device import on_cpu
from hyper_parallel.platform.mindspore.groups import group_ranks, live_group, peer_in
from hyper_parallel.platform.mindspore.tensors import detached, write_into

__all__ = ["DoneWork", "MindSporeCollectiveMembers", "equal_split_shape", "launched"]


class DoneWork:
    """The handle of something that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Whether it has ended: it has."""
        return True


class DeviceWork:
    """A handle of the device's own, whose ``wait`` also puts the result where it belongs."""

    def __init__(self, handle: Any, finish: Callable[[], None]) -> None:  # a CommHandle
        self._handle = handle
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        """Order the current stream after the operation; a second wait does nothing."""
        if self._finish is not None:
            if self._handle is not None:
                self._handle.wait()
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` was called. MindSpore's handles do not tell whether the operation has ended."""
        return self._finish is None


def launched(call: Callable[[bool], Any]) -> Any:
    """Launch one call of ``mint.distributed`` that takes ``async_op`` and gives a handle."""
    if on_cpu():
        return pending.launch(lambda: call(False))
    return DeviceWork(call(True), lambda: None)


def _run(make: Callable[[], Any], target: Any, *, async_op: bool) -> Any:
    """Make a tensor by communicating and write it into ``target``; the handle when async, else None."""

    def work() -> None:
        with compat.no_grad():
            write_into(target, make())

    if on_cpu():
        handle: Any = pending.launch(work)
        if async_op:
            return handle
        handle.wait()
        return None
    # Ascend's own calls return before the device has ended; the stream keeps their order.
    work()
    return DoneWork() if async_op else None


def _dense(data: Any) -> Any:  # mindspore.Tensor
    return detached(data).contiguous()


def _writable(data: Any, *, member: str) -> None:
    overlaps = any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride()))
    if overlaps:
        raise ValueError(
            f"{member}: cannot write into an expanded tensor of shape {tuple(data.shape)} and strides {data.stride()}; "
            "because several of its elements are one memory location; give data.contiguous()"
        )


class MindSporeCollectiveMembers(CollectiveMembers):
    """The contract of plain collectives, served by ``mint.distributed``."""

    @staticmethod
    def all_gather_into_tensor(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """Every rank's tensor, concatenated along dim 0 in group order; ``(tensor, handle)`` when async."""
        group = live_group(group_info, member="all_gather_into_tensor")
        rows = data if data.ndim else data.reshape(1)
        output = mint.empty((rows.shape[0] * len(group_ranks(group)), *rows.shape[1:]), dtype=data.dtype)
        work = _run(lambda: mint.cat(wire.gathered(_dense(rows), group), 0), output, async_op=async_op)
        return (output, work) if async_op else output

    @staticmethod
    def reduce_scatter_tensor(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """My chunk of dim 0 of the sum over ranks; ``(tensor, handle)`` when async."""
        group = live_group(group_info, member="reduce_scatter_tensor")
        size = len(group_ranks(group))
        if data.ndim == 0 or data.shape[0] % size:
            raise ValueError(
                f"reduce_scatter_tensor: cannot scatter shape {tuple(data.shape)} over {size} ranks; "
                f"because dim 0 does not divide; pad it to a multiple of {size}"
            )
        output = mint.empty((data.shape[0] // size, *data.shape[1:]), dtype=data.dtype)
        work = _run(lambda: wire.summed_chunk(_dense(data), group), output, async_op=async_op)
        return (output, work) if async_op else output

    @staticmethod
    def all_reduce(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """The sum over ranks, in place on ``data``; ``(data, handle)`` when async."""
        group = live_group(group_info, member="all_reduce")
        _writable(data, member="all_reduce")
        work = _run(lambda: wire.all_reduced(_dense(data), "sum", group), data, async_op=async_op)
        return (data, work) if async_op else data

    @staticmethod
    def all_to_all_single(input_tensor: Any, output_shape: Any, group: Any, async_op: bool = False) -> tuple[Any, Any]:
        """Piece r of dim 0 goes to rank r; always ``(output, work)``, where work is None unless async."""
        name = live_group(group, member="all_to_all_single")
        size = len(group_ranks(name))
        shape = equal_split_shape(input_tensor, output_shape, size, member="all_to_all_single")
        output = mint.empty(shape, dtype=input_tensor.dtype)
        counts = [input_tensor.shape[0] // size] * size
        work = _run(
            lambda: wire.exchanged_rows(_dense(input_tensor), counts, counts, name).reshape(shape),
            output,
            async_op=async_op,
        )
        return output, work

    @staticmethod
    def broadcast(data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """The tensor of global rank ``src``, in place on ``data``; ``(data, handle)`` when async."""
        name = live_group(group, member="broadcast")
        src = peer_in(name, src, member="broadcast")
        _writable(data, member="broadcast")
        work = _run(lambda: wire.broadcasted(_dense(data), src, name), data, async_op=async_op)
        return (data, work) if async_op else data

    @staticmethod
    def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start sending to a global rank; returns the work handle. On the CPU the message has left by then."""
        name = live_group(group, member="isend")
        dst = peer_in(name, dst, member="isend")
        pending.flush_collectives()
        with compat.no_grad():
            handle = wire.send(_dense(tensor), dst, name, tag)
        return DoneWork() if handle is None else DeviceWork(handle, lambda: None)

    @staticmethod
    def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from a global rank; returns the work handle."""
        name = live_group(group, member="irecv")
        # MindSpore has no receive from any rank, so the sender must be given.
        sender = peer_in(name, src, member="irecv")
        _writable(tensor, member="irecv")

        def receive() -> None:
            with compat.no_grad():
                write_into(tensor, wire.receive_into(_dense(tensor), sender, name, tag))

        if on_cpu():
            return pending.launch(receive, is_collective=False)
        buffer = _dense(tensor)
        return DeviceWork(wire.receive_into(buffer, sender, name, tag), lambda: write_into(tensor, buffer))


def equal_split_shape(data: Any, output_shape: Any, size: int, *, member: str) -> tuple[int, ...]:
    """The output shape of an exchange of equal pieces of dim 0, refused when the pieces do not fit."""
    shape = (output_shape,) if isinstance(output_shape, int) else tuple(int(length) for length in output_shape)
    fits = data.ndim and shape and not data.shape[0] % size and not shape[0] % size
    if not fits or math.prod(shape) != math.prod(data.shape):
        raise ValueError(
            f"{member}: cannot exchange shape {tuple(data.shape)} into {shape} among {size} ranks; because both need "
            f"dim 0 divisible by {size} and as many elements as each other; use differentiable_all_to_all_single for "
            "unequal pieces"
        )
    return shape
