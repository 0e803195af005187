"""Facts about MindSpore tensors that the engine relies on: identity, version, aliases, and how to make a view again.

Note: names of storages
    MindSpore shows no object that is one per storage: each tensor has a storage object of its own, and only the address
    in it is shared. An address names a storage only while a known holder keeps its bytes alive.

Note: versions without bytes
    Autograd's own in-place check is off wherever hooks pack a value, so we check ourselves. ``assign_value`` makes a tensor
    share another's bytes and version counter; ``set_`` then gives it other bytes and leaves the counter. A plain tensor
    would take the autograd node over as well, and a node that saves its own output would be held by what it holds. A
    parameter is a leaf for ever, so tokens are parameters. Making one is slow; used ones wait in a pool for the next.

Note: aliases
    ``set_`` on a new tensor shares bytes and nothing else: no node, no version, nothing a dispatch mode sees. What
    autograd gets back from us is always such an alias, never its own tensor.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import mindspore
import numpy as np
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import CPU

__all__ = [
    "DeviceBytes",
    "VersionToken",
    "ViewSpec",
    "alias",
    "flat_bytes",
    "is_seen",
    "numpy_dtype",
    "storage_key",
    "unseen",
]

_MOST_IDLE_TOKENS: Final = 4096
_IDLE_TOKENS: deque[Any] = deque(maxlen=_MOST_IDLE_TOKENS)  # mindspore.Parameter; append and pop are atomic


class _ThisThread(threading.local):
    """How deep this thread is in ops of our own."""

    unseen_depth = 0


_THIS_THREAD = _ThisThread()


@contextlib.contextmanager
def unseen(*, records: bool = False) -> Iterator[None]:
    """A context for our own tensor ops: no mode of ours counts them, and no graph records them unless ``records``."""
    _THIS_THREAD.unseen_depth += 1
    try:
        with contextlib.nullcontext() if records else compat.no_grad():
            yield
    finally:
        _THIS_THREAD.unseen_depth -= 1


def is_seen() -> bool:
    """Whether an op that runs now is the user's."""
    return _THIS_THREAD.unseen_depth == 0


def storage_key(tensor: Any) -> int:
    """The address of its storage (see "names of storages")."""
    return int(tensor.untyped_storage().data_ptr())


@functools.cache
def _empty(dtype: Any, device: str) -> Any:
    return mint.empty((0,), dtype=dtype, device=device)


@functools.cache
def numpy_dtype(dtype: Any) -> Any:  # numpy.dtype | None
    """The dtype of that name in numpy; None where it has none (bfloat16)."""
    try:
        return np.dtype(str(dtype).lower())
    except TypeError:
        return None


def _fresh(dtype: Any, device: str) -> Any:
    """A new tensor without elements.

    Not that of ``mint.empty``: it is never done being made, and an older primitive that is given it in a replay waits for
    ever. Nor, on the CPU, through an op: inside a cell with ``to_float`` MindSpore casts what ops are given.
    """
    if device != CPU:
        return ops.stop_gradient(_empty(dtype, device))
    kind = numpy_dtype(dtype)
    if kind is None:
        return mindspore.Tensor(np.empty(0, dtype=np.float32), dtype=dtype)
    return mindspore.Tensor.from_numpy(np.empty(0, dtype=kind))


def _over(storage: Any, dtype: Any, device: str, offset: int, size: Any, stride: Any) -> Any:
    """A new tensor over a storage of that dtype."""
    fresh = _fresh(dtype, device)
    fresh.set_(storage, offset, tuple(size), tuple(stride))
    return fresh


def _device_kind(tensor: Any) -> str:
    return str(tensor.device).partition(":")[0]


def alias(tensor: Any) -> Any:
    """A second tensor over the same bytes, without autograd history (see "aliases")."""
    return _over(
        tensor.untyped_storage(),
        tensor.dtype,
        _device_kind(tensor),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


class VersionToken:
    """Sees every later change that MindSpore counts, and holds no bytes (see "versions without bytes")."""

    __slots__ = ("_counter",)

    def __init__(self, tensor: Any) -> None:
        try:
            counter = _IDLE_TOKENS.pop()
        except IndexError:
            counter = mindspore.Parameter(
                mint.empty((0,), dtype=mindspore.float32), name="version", requires_grad=False
            )
        counter.assign_value(tensor)
        counter.set_(_empty(tensor.dtype, _device_kind(tensor)).untyped_storage(), 0, (0,), (1,))
        self._counter = counter

    @property
    def _version(self) -> int:
        """What the tensor's version is now; named as on a tensor."""
        return int(self._counter._version)

    def __del__(self, _idle: deque[Any] = _IDLE_TOKENS) -> None:
        counter = getattr(self, "_counter", None)
        if counter is not None:
            _idle.append(counter)


class DeviceBytes:
    """Some bytes of a storage: what the engine moves. It is sliced like a flat tensor, without an op."""

    __slots__ = ("__weakref__", "_nbytes", "_start", "tensor")

    def __init__(self, tensor: Any, start: int, nbytes: int) -> None:
        self.tensor = tensor  # any contiguous tensor over the whole storage
        self._start = start
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, stop, _ = part.indices(self._nbytes)
        return DeviceBytes(self.tensor, self._start + start, max(0, stop - start))

    @property
    def storage_address(self) -> int:
        """Where the storage begins."""
        return storage_key(self.tensor)

    @property
    def start(self) -> int:
        """Where these bytes begin in it."""
        return self._start

    @property
    def address(self) -> int:
        """Where these bytes begin in the process; of use on the CPU only."""
        return self.storage_address + self._start

    def as_tensor(self) -> Any:
        """These bytes as a flat uint8 tensor; made where ops are unseen."""
        whole = self.tensor if self.tensor.dtype == mindspore.uint8 else self.tensor.view(mindspore.uint8)
        return _over(whole.untyped_storage(), mindspore.uint8, _device_kind(whole), self._start, (self._nbytes,), (1,))


def flat_bytes(tensor: Any) -> DeviceBytes:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    nbytes = int(storage.nbytes())
    whole = _over(storage, tensor.dtype, _device_kind(tensor), 0, (nbytes // tensor.itemsize,), (1,))
    return DeviceBytes(whole, 0, nbytes)


class ViewSpec:
    """How to make the exact view again: the same size, strides, offset and dtype over the same bytes."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: Any) -> None:
        self.dtype = tensor.dtype
        self.size = tuple(tensor.shape)
        self.stride = tuple(tensor.stride())
        self.offset = int(tensor.storage_offset())

    def over(self, device_bytes: DeviceBytes) -> Any:
        """The view over these bytes."""
        whole = device_bytes.tensor
        if whole.dtype != self.dtype:
            with unseen():
                whole = whole.view(self.dtype)
        return _over(whole.untyped_storage(), self.dtype, _device_kind(whole), self.offset, self.size, self.stride)
