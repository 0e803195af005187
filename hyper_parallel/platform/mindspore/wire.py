"""What is really sent between ranks: dense tensors, and one function for each kind of exchange.

Every function has one branch for the CPU, whose backend lacks most kernels, and one for Ascend. No other module asks
which device it is. The CPU's routes are composed of what its backend has: ``all_gather`` into a list, ``all_reduce`` of
some dtypes, ``broadcast`` and messages between two ranks. Where a dtype cannot travel its bytes do.

On the CPU a message begins with a header that names its group, tag and length, because the backend ignores tags and
keeps one order for all groups; a message for another receiver is put aside until that receiver asks for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import mindspore
import mindspore.mint.distributed as dist
import numpy as np
from mindspore import mint

from hyper_parallel.errors import GroupError, UnsupportedMemberError
from hyper_parallel.platform.mindspore.device import on_cpu
from hyper_parallel.platform.mindspore.groups import group_ranks, my_rank

__all__ = [
    "all_reduced",
    "broadcasted",
    "exchanged_rows",
    "exchanged_with",
    "gathered",
    "receive_into",
    "send",
    "summed_chunk",
]

_TRAVELS: Final = frozenset({"Float16", "BFloat16", "Float32", "Float64", "Int8", "Int32", "Int64"})
"""Dtypes that the CPU's backend moves."""
_REDUCES: Final = _TRAVELS - {"Float64"}
"""Dtypes that the CPU's backend reduces."""
_COMBINE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": lambda a, b: mint.maximum(a, b),
    "min": lambda a, b: mint.minimum(a, b),
}


def _as_bytes(dense: Any) -> Any:  # mindspore.Tensor -> mindspore.Tensor of int8
    raw = np.frombuffer(np.ascontiguousarray(dense.asnumpy()).tobytes(), np.int8)
    return mindspore.Tensor(raw.copy())


def _from_bytes(raw: Any, like: Any) -> Any:
    array = np.frombuffer(raw.asnumpy().tobytes(), like.asnumpy().dtype)
    return mindspore.Tensor(array.reshape(tuple(like.shape)).copy(), like.dtype)


def gathered(dense: Any, group: str) -> list[Any]:
    """Every rank's tensor, in group order."""
    size = len(group_ranks(group))
    if size == 1 or dense.size == 0:
        return [dense.copy() for _ in range(size)]
    if on_cpu() and str(dense.dtype) not in _TRAVELS:
        return [_from_bytes(raw, dense) for raw in gathered(_as_bytes(dense), group)]
    # The CPU's kernel wants a dim; a scalar travels as one row.
    flat = dense.reshape(-1)
    pieces = [mint.empty(tuple(flat.shape), dtype=flat.dtype) for _ in range(size)]
    dist.all_gather(pieces, flat, group=group)
    return [piece.reshape(tuple(dense.shape)) for piece in pieces]


def all_reduced(dense: Any, op: str, group: str) -> Any:
    """A new tensor with the reduction over ranks: sum, prod, max or min."""
    if len(group_ranks(group)) == 1 or dense.size == 0:
        return dense.copy()
    if on_cpu() and str(dense.dtype) not in _REDUCES:
        first, *others = gathered(dense, group)
        for other in others:
            first = _COMBINE[op](first, other)
        return first
    result = dense.reshape(-1).copy()
    dist.all_reduce(result, op, group=group)
    return result.reshape(tuple(dense.shape))


def summed_chunk(dense: Any, group: str) -> Any:
    """My chunk of dim 0, which divides, of the sum over ranks."""
    ranks = group_ranks(group)
    rows = dense.shape[0] // len(ranks)
    if on_cpu() or dense.size == 0:
        start = ranks.index(my_rank()) * rows
        return all_reduced(dense, "sum", group)[start : start + rows].copy()
    output = mint.empty((rows, *dense.shape[1:]), dtype=dense.dtype)
    dist.reduce_scatter_tensor(output, dense, group=group)
    return output


def broadcasted(dense: Any, src: int, group: str) -> Any:
    """The tensor of global rank ``src``; mine has its shape."""
    if len(group_ranks(group)) == 1 or dense.size == 0:
        return dense.copy()
    if on_cpu() and str(dense.dtype) not in _TRAVELS:
        return _from_bytes(broadcasted(_as_bytes(dense), src, group), dense)
    result = dense.reshape(-1).copy()
    dist.broadcast(result, src, group=group)
    return result.reshape(tuple(dense.shape))


def exchanged_rows(dense: Any, sent: list[int], received: list[int], group: str) -> Any:
    """Rows to every rank and from every rank; ``sent`` and ``received`` count them in group order."""
    columns = tuple(dense.shape[1:])
    if not on_cpu():
        output = mint.empty((sum(received), *columns), dtype=dense.dtype)
        dist.all_to_all_single(output, dense, received, sent, group=group)
        return output
    pieces = _exchange(_as_pieces(dense, sent, columns), received, columns, dense, group)
    present = [piece for piece in pieces if piece is not None]
    if not present:
        return mint.zeros((0, *columns), dtype=dense.dtype)
    return mint.cat(present, 0) if len(present) > 1 else present[0]


def _as_pieces(dense: Any, counts: list[int], columns: tuple[int, ...]) -> list[Any]:
    """The rows of each rank as a tensor of its own, None where there are none: nothing empty can be sent."""
    starts = [sum(counts[:place]) for place in range(len(counts))]
    has_width = 0 not in columns
    return [dense[a : a + n].copy() if n and has_width else None for a, n in zip(starts, counts)]


def _exchange(pieces: list[Any], received: list[int], columns: tuple[int, ...], like: Any, group: str) -> list[Any]:
    ranks = group_ranks(group)
    me = ranks.index(my_rank())
    arrived: list[Any] = [None] * len(ranks)
    arrived[me] = pieces[me]
    has_width = 0 not in columns
    # Sending does not wait for the receiver, so all pieces leave before the first is awaited.
    for place, piece in enumerate(pieces):
        if place != me and piece is not None:
            _post(piece, ranks[place], group)
    for place, count in enumerate(received):
        if place != me and count and has_width:
            arrived[place] = _collect((count, *columns), like.dtype, ranks[place], group)
    return arrived


def exchanged_with(dense: Any, peer: int, group: str) -> Any:
    """My tensor for the one of global rank ``peer``, which has the same shape."""
    if dense.size == 0:
        return dense.copy()
    if on_cpu():
        _post(dense, peer, group)
        return _collect(tuple(dense.shape), dense.dtype, peer, group)
    received = mint.empty(tuple(dense.shape), dtype=dense.dtype)
    both = [dist.P2POp("isend", dense, peer, group), dist.P2POp("irecv", received, peer, group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return received


def _post(dense: Any, peer: int, group: str) -> None:
    carried = dense.reshape(-1).contiguous() if str(dense.dtype) in _TRAVELS else _as_bytes(dense)
    dist.isend(carried, peer, group).wait()


def _collect(shape: tuple[int, ...], dtype: Any, peer: int, group: str) -> Any:
    target = mint.empty(shape, dtype=dtype)
    travels = str(dtype) in _TRAVELS
    length, kind = (target.size, dtype) if travels else (target.size * target.itemsize, mindspore.int8)
    carrier = mint.empty((length,), dtype=kind)
    dist.irecv(carrier, peer, group).wait()
    return carrier.reshape(shape) if travels else _from_bytes(carrier, target)


_put_aside: dict[tuple[int, int, int], list[Any]] = {}
"""(sender, group, tag) to messages that came while another was awaited."""


def _group_number(group: str) -> int:
    return zlib.crc32(group.encode())


def send(dense: Any, dst: int, group: str, tag: int) -> Any:
    """Start sending to a global rank; a handle on Ascend, None on the CPU, where it is done."""
    if not on_cpu():
        _refuse_tag(tag, member="isend")
        return dist.isend(dense, dst, group)
    carried = _as_bytes(dense)
    header = mindspore.Tensor(np.array([_group_number(group), tag, carried.size], np.int64))
    dist.isend(header, dst, group).wait()
    if carried.size:
        dist.isend(carried, dst, group).wait()
    return None


def receive_into(dense: Any, src: int, group: str, tag: int) -> Any:
    """The message of that tag from a global rank, as a tensor like ``dense``, on the CPU; a handle on Ascend."""
    if not on_cpu():
        _refuse_tag(tag, member="irecv")
        return dist.irecv(dense, src, group)
    wanted = (src, _group_number(group), tag)
    while not _put_aside.get(wanted):
        header = mint.zeros((3,), dtype=mindspore.int64)
        dist.irecv(header, src, group).wait()
        number, its_tag, length = (int(value) for value in header.asnumpy())
        carrier = mint.empty((length,), dtype=mindspore.int8)
        if length:
            dist.irecv(carrier, src, group).wait()
        _put_aside.setdefault((src, number, its_tag), []).append(carrier)
    carrier = _put_aside[wanted].pop(0)
    expected = dense.size * dense.itemsize
    if carrier.size != expected:
        raise GroupError(
            f"irecv: the message of rank {src} has {carrier.size} bytes and the tensor {expected}; "
            "give a tensor of the sender's shape and dtype"
        )
    return _from_bytes(carrier, dense)


def _refuse_tag(tag: int, *, member: str) -> None:
    if tag:
        raise UnsupportedMemberError(
            member=f"{member}(tag={tag})",
            platform="MindSporePlatform",
            reason="MindSpore reserves tags and ignores them on Ascend, so messages would cross",
            instead="send without a tag, in one order on both sides",
        )
