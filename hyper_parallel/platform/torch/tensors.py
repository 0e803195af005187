"""Tensors and dtypes on torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.base.tensors import TensorMembers
from hyper_parallel.platform.torch.compat import DTensor
from hyper_parallel.platform.torch.device import accelerator_type

__all__ = ["TorchTensorMembers", "dtype_of", "require_tensor"]

_NUMPY_HAS_NO = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


@functools.cache
def _known_dtypes() -> Mapping[str, torch.dtype]:
    names = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    names["bool_"] = torch.bool  # MindSpore's spelling
    return MappingProxyType(names)


def dtype_of(name: Any, *, member: str) -> torch.dtype:
    """The dtype of a name, in any case, with or without a framework's prefix; a dtype is itself."""
    if isinstance(name, torch.dtype):
        return name
    known = _known_dtypes()
    found = known.get(name.rpartition(".")[2].lower()) if isinstance(name, str) and _prefix_is_known(name) else None
    if found is None:
        raise ValueError(f"{member}: {name!r} is no dtype of torch; known are {', '.join(sorted(known))}")
    return found


def _prefix_is_known(name: str) -> bool:
    return name.rpartition(".")[0].lower() in ("", "torch", "mindspore")


def require_tensor(obj: Any, *, member: str) -> torch.Tensor:
    """``obj``, if it is a tensor; else the ``TypeError`` of that member."""
    if not isinstance(obj, torch.Tensor):
        raise TypeError(f"{member}: expected a torch.Tensor, got {type(obj).__name__}")
    return obj


def _checked_dim(data: torch.Tensor, dim: int, *, member: str) -> int:
    if not -data.dim() <= dim < data.dim():
        raise IndexError(f"{member}: a tensor of shape {tuple(data.shape)} has no dim {dim}")
    return dim % data.dim()


class TorchTensorMembers(TensorMembers):
    """Tensors and dtypes; beside the base also ``ones``, ``full`` and ``empty``."""

    Tensor: ClassVar[Any] = torch.Tensor
    tensor: ClassVar[Any] = torch.tensor
    Parameter: ClassVar[Any] = torch.nn.Parameter
    Module: ClassVar[Any] = torch.nn.Module
    Function: ClassVar[Any] = torch.autograd.Function
    dtype: ClassVar[Any] = torch.dtype
    tensor_dtype: ClassVar[Any] = torch  # where the dtypes are: platform.tensor_dtype.float32
    DTensorBase: ClassVar[Any] = DTensor

    @staticmethod
    def is_tensor(obj: Any) -> bool:
        """Whether ``obj`` is a torch tensor, a parameter or a DTensor."""
        return isinstance(obj, torch.Tensor)

    @staticmethod
    def get_element_size(tensor: Any) -> int:
        """Bytes of one element."""
        return require_tensor(tensor, member="get_element_size").element_size()

    @staticmethod
    def get_tensor_storage_size(tensor: Any) -> int:
        """Serialised bytes: elements × element size."""
        data = require_tensor(tensor, member="get_tensor_storage_size")
        return data.numel() * data.element_size()

    @staticmethod
    def tensor_type_cast(input_data: Any, cast_type: Any) -> torch.Tensor:
        """``input_data`` in the dtype of that name; differentiable between floating dtypes."""
        data = require_tensor(input_data, member="tensor_type_cast")
        dtype = dtype_of(cast_type, member="tensor_type_cast")
        try:
            return data.to(dtype)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"tensor_type_cast: torch cannot convert {data.dtype} to {dtype} on {data.device}: {error}. "
                "Cast to a dtype that torch computes in, such as float32, bfloat16, int8 or uint8"
            ) from error

    @staticmethod
    def chunk(data: torch.Tensor, split_dim: int, split_size: int, index: int) -> torch.Tensor:
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
        return data.narrow(dim, start, min(split_size, length - start))

    @staticmethod
    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """The tensors joined along ``dim``."""
        return torch.cat(tuple(tensors), dim=dim)

    @staticmethod
    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """Numbers from ``start`` to ``end``; with one bound, from 0 to it."""
        first, last = (0, start) if end is None else (start, end)
        return torch.arange(first, last, step, dtype=dtype, device=device)

    @staticmethod
    def zeros(size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """A tensor of zeros."""
        return torch.zeros(size, dtype=dtype, device=device)

    @staticmethod
    def ones(size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """A tensor of ones."""
        return torch.ones(size, dtype=dtype, device=device)

    @staticmethod
    def full(size: Any, fill_value: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """A tensor of one value."""
        return torch.full((size,) if isinstance(size, int) else tuple(size), fill_value, dtype=dtype, device=device)

    @staticmethod
    def empty(size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        """A tensor with uninitialised contents."""
        return torch.empty(size, dtype=dtype, device=device)

    @staticmethod
    def new_tensor(tensor_shape: Any, tensor_type: Any, device: Any) -> torch.Tensor:
        """A tensor with uninitialised contents."""
        return torch.empty(tensor_shape, dtype=dtype_of(tensor_type, member="new_tensor"), device=device)

    @staticmethod
    def full_like(tensor: torch.Tensor, fill_value: Any, dtype: Any = None) -> torch.Tensor:
        """A tensor like ``tensor``, filled with one value."""
        return torch.full_like(tensor, fill_value, dtype=dtype)

    @staticmethod
    def empty_like(
        tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        """An unwritten tensor like ``tensor``; without an accelerator there is nothing to pin for."""
        pinned = pin_memory and accelerator_type() is not None
        return torch.empty_like(tensor, dtype=dtype, device=device, pin_memory=pinned)

    @staticmethod
    def construct_strided_slice(
        x: torch.Tensor, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """``x[begin[0]:end[0]:stride[0], ...]``; negative strides walk backwards."""
        if not len(begin) == len(end) == len(stride) <= x.dim():
            raise ValueError(
                f"construct_strided_slice: begin, end and stride must have one length, at most {x.dim()} for shape "
                f"{tuple(x.shape)}; got {len(begin)}, {len(end)} and {len(stride)}"
            )
        if 0 in stride:
            raise ValueError(f"construct_strided_slice: a stride cannot be 0; got {list(stride)}")
        forward = tuple(slice(b, e, s) if s > 0 else slice(None) for b, e, s in zip(begin, end, stride))
        result = x[forward]
        for dim, (b, e, s) in enumerate(zip(begin, end, stride)):
            if s < 0:  # torch's own indexing knows no negative stride
                rows = range(*slice(b, e, s).indices(x.shape[dim]))
                result = result.index_select(dim, torch.tensor(rows, dtype=torch.int64, device=x.device))
        return result

    @staticmethod
    def get_tensor_transform() -> NoReturn:
        """Torch has no layout transformer; a DTensor redistributes itself."""
        raise UnsupportedMemberError(
            member="get_tensor_transform",
            platform="TorchPlatform",
            reason="torch has no tensor-layout transformer",
            instead="call DTensor.redistribute(mesh, placements), or DTensor.full_tensor(), on the sharded tensor",
        )

    @staticmethod
    def set_tensor_requires_grad(input_tensor: torch.Tensor) -> torch.Tensor:
        """Ask for the gradient of a leaf and return it; a non-leaf is returned as it is."""
        return input_tensor.requires_grad_() if input_tensor.is_leaf else input_tensor

    @staticmethod
    def cast_fp_tensor(dtype: Any, x: Any) -> Any:
        """A floating tensor in ``dtype``; anything else, and a tensor already in it, is the same object."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        return x.to(dtype)

    @staticmethod
    def tensor_to_numpy(tensor: Any) -> Any:
        """A numpy array of the values; of a DTensor, the whole tensor's, so every rank must call."""
        data = require_tensor(tensor, member="tensor_to_numpy").detach()
        if isinstance(data, DTensor):
            data = data.full_tensor()
        if data.dtype in _NUMPY_HAS_NO:
            data = data.to(torch.float32)
        elif data.dtype is torch.complex32:
            data = data.to(torch.complex64)
        return data.cpu().resolve_conj().resolve_neg().numpy()

    @staticmethod
    def str_to_dtype(dtype_str: str) -> torch.dtype:
        """The dtype of a name."""
        return dtype_of(dtype_str, member="str_to_dtype")

    @staticmethod
    def list_to_size(size_list: Sequence[int]) -> torch.Size:
        """A list of lengths as ``torch.Size``."""
        return torch.Size(size_list)
