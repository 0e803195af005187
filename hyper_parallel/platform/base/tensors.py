"""The Platform members about tensors and dtypes: names, parameters and defaults, and what needs no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hyper_parallel.core import trees
from hyper_parallel.platform.base.unsupported import class_or_instance_method, needs_framework

__all__ = ["TensorMembers"]


class TensorMembers:
    """Tensors and dtypes. ``Any`` below stands for a framework's tensor, dtype, device or size."""

    Tensor: ClassVar[Any] = None
    tensor: ClassVar[Any] = None
    Parameter: ClassVar[Any] = None
    Module: ClassVar[Any] = None
    Function: ClassVar[Any] = None
    dtype: ClassVar[Any] = None
    tensor_dtype: ClassVar[Any] = None
    DTensorBase: ClassVar[Any] = None

    @staticmethod
    def is_tensor(obj: Any) -> bool:
        """Whether ``obj`` is a tensor of the framework."""
        raise needs_framework("is_tensor")

    @staticmethod
    def get_element_size(tensor: Any) -> int:
        """Bytes of one element."""
        raise needs_framework("get_element_size")

    @staticmethod
    def get_tensor_storage_size(tensor: Any) -> int:
        """Serialised bytes: elements × element size, whatever the storage behind a view holds."""
        raise needs_framework("get_tensor_storage_size")

    @staticmethod
    def tensor_type_cast(input_data: Any, cast_type: Any) -> Any:
        """``input_data`` in the dtype of that name (or that dtype)."""
        raise needs_framework("tensor_type_cast")

    @staticmethod
    def chunk(data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Piece ``index`` of ``data`` cut into pieces of ``split_size`` along ``split_dim``; differentiable."""
        raise needs_framework("chunk")

    @staticmethod
    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        """The tensors joined along ``dim``."""
        raise needs_framework("cat")

    @staticmethod
    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None) -> Any:
        """Numbers from ``start`` to ``end``; with one bound, from 0 to it."""
        raise needs_framework("arange")

    @staticmethod
    def zeros(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of zeros."""
        raise needs_framework("zeros")

    @staticmethod
    def new_tensor(tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """A tensor with uninitialised contents."""
        raise needs_framework("new_tensor")

    @staticmethod
    def full_like(tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A tensor like ``tensor``, filled with one value."""
        raise needs_framework("full_like")

    @staticmethod
    def empty_like(tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """An unwritten tensor like ``tensor``; pinned where the device has pinned memory."""
        raise needs_framework("empty_like")

    @staticmethod
    def construct_strided_slice(x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]) -> Any:
        """``x[begin[0]:end[0]:stride[0], ...]``; differentiable."""
        raise needs_framework("construct_strided_slice")

    @staticmethod
    def get_tensor_transform() -> Any:
        """The framework's own layout transformer, where it has one."""
        raise needs_framework("get_tensor_transform")

    @staticmethod
    def set_tensor_requires_grad(input_tensor: Any) -> Any:
        """Ask for the gradient of a leaf and return it; a non-leaf is returned as it is."""
        raise needs_framework("set_tensor_requires_grad")

    @staticmethod
    def cast_fp_tensor(dtype: Any, x: Any) -> Any:
        """A floating tensor in ``dtype``; anything else, and a tensor already in it, is the same object."""
        raise needs_framework("cast_fp_tensor")

    @class_or_instance_method
    def apply_to_tensors(cls, fn: Callable[[Any], Any], container: Any) -> Any:
        """``container`` with ``fn`` applied to its tensors; everything else is kept."""
        return trees.tree_map(lambda leaf: fn(leaf) if cls.is_tensor(leaf) else leaf, container, cls.is_tensor)

    @staticmethod
    def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
        """``tree`` with ``fn`` applied to every leaf, ``None`` and strings too."""
        return trees.tree_map(fn, tree)

    @staticmethod
    def tensor_to_numpy(tensor: Any) -> Any:
        """A numpy array of the values, detached and on the host; bfloat16 becomes float32."""
        raise needs_framework("tensor_to_numpy")

    @staticmethod
    def str_to_dtype(dtype_str: str) -> Any:
        """The dtype of ``"torch.float32"``, ``"mindspore.float32"``, ``"float32"`` or ``"Float32"``."""
        raise needs_framework("str_to_dtype")

    @staticmethod
    def list_to_size(size_list: Sequence[int]) -> Any:
        """A list of lengths as the framework's own size type."""
        raise needs_framework("list_to_size")
