"""Tensors and dtypes on MindSpore."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import mindspore
import numpy as np
from mindspore import mint, ops

from hyper_parallel.platform.base.tensors import TensorMembers
from hyper_parallel.platform.base.unsupported import class_or_instance_method
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import device_name, on_cpu

__all__ = ["MindSporeTensorMembers", "NoDTensor", "detached", "dtype_of", "require_tensor", "write_into"]


class NoDTensor(mindspore.Tensor):  # type: ignore[misc]
    """Stands in for a distributed tensor, which MindSpore does not have; nothing is an instance of it."""


@functools.cache
def _known_dtypes() -> Mapping[str, Any]:
    names = {
        name: value
        for name, value in vars(mindspore).items()
        if isinstance(value, compat.Number) and type(value) is not compat.Number and not name.startswith("_")
    }
    names["bool"] = mindspore.bool_
    return MappingProxyType(names)


def dtype_of(name: Any, *, member: str) -> Any:  # mindspore.dtype
    """The dtype of a name, in any case, with or without a framework's prefix; a dtype is itself."""
    if isinstance(name, mindspore.dtype.Type):
        return name
    known = _known_dtypes()
    found = known.get(name.rpartition(".")[2].lower()) if isinstance(name, str) and _prefix_is_known(name) else None
    if found is None:
        raise ValueError(f"{member}: {name!r} is no dtype of mindspore; known are {', '.join(sorted(known))}")
    return found


def _prefix_is_known(name: str) -> bool:
    return name.rpartition(".")[0].lower() in ("", "torch", "mindspore")


def require_tensor(obj: Any, *, member: str) -> Any:  # mindspore.Tensor
    """``obj``, if it is a tensor; else the ``TypeError`` of that member."""
    if not isinstance(obj, mindspore.Tensor):
        raise TypeError(f"{member}: expected a mindspore.Tensor, got {type(obj).__name__}")
    return obj


def detached(tensor: Any) -> Any:  # mindspore.Tensor
    """A tensor of the same memory without autograd history."""
    with compat.no_grad():
        return ops.stop_gradient(tensor)


def write_into(target: Any, source: Any) -> None:  # two mindspore.Tensor of one shape
    """Put the values of ``source`` into the memory of ``target``, whatever its strides and offset.

    On the CPU ``copy_`` into a view silently writes elsewhere. There the whole storage is copied out, changed and
    copied back, which is right for every view.
    """
    if target.size == 0:
        return
    with compat.no_grad():
        is_plain = target.is_contiguous() and target.storage_offset() == 0
        if is_plain or not on_cpu():
            target.copy_(source)
            return
        _write_through_storage(target, source.to(target.dtype).contiguous())


def _write_through_storage(target: Any, source: Any) -> None:
    storage = target.untyped_storage()
    buffer = mint.empty((storage.size(),), dtype=mindspore.uint8)
    buffer.untyped_storage().copy_(storage)
    size = target.itemsize
    raw = buffer.asnumpy().view(f"V{size}")[target.storage_offset() :]
    strides = [step * size for step in target.stride()]
    values = np.ascontiguousarray(source.asnumpy()).view(f"V{size}").reshape(tuple(target.shape))
    np.lib.stride_tricks.as_strided(raw, tuple(target.shape), strides)[...] = values
    storage.copy_(buffer.untyped_storage())


def _as_shape(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(int(length) for length in size)


def _placed(tensor: Any, device: Any, *, member: str) -> Any:
    name = device_name(device, member=member)
    return tensor if device is None or str(tensor.device).lower().startswith(name.lower()) else tensor.to(name)


def _checked_dim(data: Any, dim: int, *, member: str) -> int:
    if not -data.ndim <= dim < data.ndim:
        raise IndexError(f"{member}: a tensor of shape {tuple(data.shape)} has no dim {dim}")
    return dim % int(data.ndim)


class MindSporeTensorMembers(TensorMembers):
    """Tensors and dtypes; beside the base also ``ones``, ``full`` and ``empty``."""

    Tensor: ClassVar[Any] = mindspore.Tensor
    tensor: ClassVar[Any] = staticmethod(mindspore.tensor)
    Parameter: ClassVar[Any] = mindspore.Parameter
    Module: ClassVar[Any] = mindspore.nn.Cell
    Function: ClassVar[Any] = compat.Function
    dtype: ClassVar[Any] = mindspore.dtype.Type
    tensor_dtype: ClassVar[Any] = mindspore  # where the dtypes are: platform.tensor_dtype.float32
    DTensorBase: ClassVar[Any] = NoDTensor

    @staticmethod
    def is_tensor(obj: Any) -> bool:
        """Whether ``obj`` is a MindSpore tensor or parameter."""
        return isinstance(obj, mindspore.Tensor)

    @staticmethod
    def get_element_size(tensor: Any) -> int:
        """Bytes of one element."""
        return int(require_tensor(tensor, member="get_element_size").itemsize)

    @staticmethod
    def get_tensor_storage_size(tensor: Any) -> int:
        """Serialised bytes: elements × element size."""
        data = require_tensor(tensor, member="get_tensor_storage_size")
        return int(math.prod(data.shape)) * int(data.itemsize)

    @staticmethod
    def tensor_type_cast(input_data: Any, cast_type: Any) -> Any:
        """``input_data`` in the dtype of that name; differentiable between floating dtypes."""
        data = require_tensor(input_data, member="tensor_type_cast")
        return data.to(dtype_of(cast_type, member="tensor_type_cast"))

    @staticmethod
    def chunk(data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Piece ``index``; a view. The last piece is shorter where the sizes do not divide."""
        dim = _checked_dim(data, split_dim, member="chunk")
        if split_size < 1:
            raise ValueError(f"chunk: split_size is the size of each piece, 1 or more; got {split_size}")
        length = data.shape[dim]
        count = max(1, -(-length // split_size))
        if not 0 <= index < count:
            raise IndexError(
                f"chunk: there is no piece {index}; {length} rows on dim {dim} in pieces of {split_size} "
                f"make {count}, numbered 0 to {count - 1}"
            )
        start = index * split_size
        rows = min(split_size, length - start)
        # MindSpore's narrow refuses to take no rows; a batch without rows is its own only piece.
        return data.narrow(dim, start, rows) if rows else data

    @staticmethod
    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        """The tensors joined along ``dim``."""
        return mint.cat(tuple(tensors), dim)

    @staticmethod
    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None) -> Any:
        """Numbers from ``start`` to ``end``; with one bound, from 0 to it."""
        first, last = (0, start) if end is None else (start, end)
        return _placed(ops.arange(first, last, step, dtype=dtype), device, member="arange")

    @staticmethod
    def zeros(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of zeros; float32 unless named."""
        return _placed(mint.zeros(_as_shape(size), dtype=dtype or mindspore.float32), device, member="zeros")

    @staticmethod
    def ones(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of ones; float32 unless named."""
        return _placed(mint.ones(_as_shape(size), dtype=dtype or mindspore.float32), device, member="ones")

    @staticmethod
    def full(size: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of one value; without a dtype, in that of the value."""
        kind = dtype or mindspore.Tensor(fill_value).dtype  # MindSpore's own guess makes 3.0 an integer
        return _placed(ops.full(_as_shape(size), fill_value, dtype=kind), device, member="full")

    @staticmethod
    def empty(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor with uninitialised contents."""
        name = device_name(device, member="empty")
        return mint.empty(_as_shape(size), dtype=dtype or mindspore.float32, device=name)

    @class_or_instance_method
    def new_tensor(cls, tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """A tensor with uninitialised contents."""
        return cls.empty(tensor_shape, dtype_of(tensor_type, member="new_tensor"), device)

    @staticmethod
    def full_like(tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A tensor like ``tensor``, filled with one value."""
        return ops.full_like(tensor, fill_value, dtype=dtype or tensor.dtype)

    @staticmethod
    def empty_like(tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """An unwritten tensor like ``tensor``; the CPU's device context has no pinned memory, so there it is plain."""
        name = str(tensor.device).partition(":")[0] if device is None else device_name(device, member="empty_like")
        if pin_memory and not on_cpu():
            return mint.empty_like(tensor, dtype=dtype or tensor.dtype, device=name, pin_memory=True)
        return mint.empty_like(tensor, dtype=dtype or tensor.dtype, device=name)

    @staticmethod
    def construct_strided_slice(x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]) -> Any:
        """``x[begin[0]:end[0]:stride[0], ...]``; negative strides walk backwards."""
        if not len(begin) == len(end) == len(stride) <= x.ndim:
            raise ValueError(
                f"construct_strided_slice: begin, end and stride must have one length, at most {x.ndim} for shape "
                f"{tuple(x.shape)}; got {len(begin)}, {len(end)} and {len(stride)}"
            )
        if 0 in stride:
            raise ValueError(f"construct_strided_slice: a stride cannot be 0; got {list(stride)}")
        result = x
        for dim, bounds in enumerate(zip(begin, end, stride)):
            rows = range(*slice(*bounds).indices(x.shape[dim]))
            # MindSpore's strided slice gives wrong gradients for negative strides; picking rows does not.
            if rows != range(x.shape[dim]):
                result = ops.gather(result, mindspore.Tensor(list(rows), mindspore.int64), dim)
        return result

    @staticmethod
    def get_tensor_transform() -> Any:
        """MindSpore's layout transformer, one per process."""
        return compat.tensor_transform()

    @staticmethod
    def set_tensor_requires_grad(input_tensor: Any) -> Any:
        """Ask for the gradient of a tensor and return it; MindSpore keeps the history of one that has some."""
        input_tensor.requires_grad_()
        return input_tensor

    @staticmethod
    def cast_fp_tensor(dtype: Any, x: Any) -> Any:
        """A floating tensor in ``dtype``; anything else, and a tensor already in it, is the same object."""
        if not isinstance(x, mindspore.Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        return x.to(dtype)

    @staticmethod
    def tensor_to_numpy(tensor: Any) -> Any:
        """A numpy array of the values, with memory of its own."""
        data = detached(require_tensor(tensor, member="tensor_to_numpy"))
        if data.dtype == mindspore.bfloat16:
            data = data.to(mindspore.float32)
        return np.array(data.asnumpy(), copy=True)

    @staticmethod
    def str_to_dtype(dtype_str: str) -> Any:
        """The dtype of a name."""
        return dtype_of(dtype_str, member="str_to_dtype")

    @staticmethod
    def list_to_size(size_list: Sequence[int]) -> tuple[int, ...]:
        """A list of lengths as the tuple that MindSpore takes for a shape."""
        return tuple(size_list)
