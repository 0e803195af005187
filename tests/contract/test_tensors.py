"""Tensors and dtypes: values, gradients, and errors that list what is known."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedMemberError
from hyper_parallel.platform.platform import Platform

from .marks import covers

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@covers("is_tensor")
def test_only_tensors_are_tensors(platform, adapter):
    assert platform.is_tensor(adapter.tensor([1.0]))
    assert not platform.is_tensor(np.ones(1))
    assert not platform.is_tensor(None)


@covers("get_element_size", "get_tensor_storage_size")
def test_bytes_are_elements_times_element_size(platform, adapter):
    data = adapter.tensor(np.ones((3, 5)), "bfloat16")
    assert platform.get_element_size(data) == 2
    assert platform.get_tensor_storage_size(data) == 3 * 5 * 2
    view = platform.chunk(data, 0, 1, 0)
    assert platform.get_tensor_storage_size(view) == 5 * 2
    with pytest.raises(TypeError, match=r"get_tensor_storage_size: expected a .*Tensor, got list"):
        platform.get_tensor_storage_size([1.0])
    with pytest.raises(TypeError, match=r"get_element_size: expected a .*Tensor, got list"):
        platform.get_element_size([1.0])


@covers("tensor_type_cast", "str_to_dtype")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_name_casts(platform, adapter, name):
    cast = platform.tensor_type_cast(adapter.tensor([0.0, 1.0, 2.0], "float32"), name)
    assert cast.dtype == platform.str_to_dtype(name)
    assert platform.get_element_size(cast) == {"bfloat16": 2, "bool": 1}.get(name) or np.dtype(name).itemsize
    expected = [0, 1, 1] if name == "bool" else [0, 1, 2]
    assert adapter.numpy(cast).astype(int).tolist() == expected


@covers("tensor_type_cast", "str_to_dtype")
def test_an_unknown_dtype_lists_the_known(platform, adapter):
    with pytest.raises(ValueError, match=r"tensor_type_cast: 'float33' is no dtype .* known are .*bfloat16.*float32"):
        platform.tensor_type_cast(adapter.tensor([1.0]), "float33")
    with pytest.raises(ValueError, match=r"str_to_dtype: 'numpy.float32' is no dtype .* known are .*float32"):
        platform.str_to_dtype("numpy.float32")
    with pytest.raises(ValueError, match=r"str_to_dtype: 3 is no dtype"):
        platform.str_to_dtype(3)


@covers("str_to_dtype")
@pytest.mark.parametrize("spelling", ["torch.{}", "mindspore.{}", "{}"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_dtypes_are_read_in_every_spelling(platform, spelling, name):
    dtype = platform.str_to_dtype(spelling.format(name))
    assert dtype == platform.str_to_dtype(spelling.format(name.capitalize()))
    assert platform.zeros((1,), dtype=dtype).dtype == dtype


@covers("list_to_size")
def test_a_list_is_a_size(platform):
    size = platform.list_to_size([2, 3])
    assert tuple(size) == (2, 3)
    assert tuple(platform.zeros(size).shape) == (2, 3)


@covers("chunk")
def test_chunks_have_the_size_asked_for(platform, adapter):
    data = np.arange(14.0).reshape(2, 7)
    for index, expected in enumerate([data[:, 0:3], data[:, 3:6], data[:, 6:7]]):
        np.testing.assert_array_equal(adapter.numpy(platform.chunk(adapter.tensor(data), 1, 3, index)), expected)
        np.testing.assert_array_equal(adapter.numpy(platform.chunk(adapter.tensor(data), -1, 3, index)), expected)


@covers("chunk")
def test_chunk_is_differentiable(platform, adapter):
    data = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    (gradient,) = adapter.gradients(lambda x: (platform.chunk(x, 1, 2, 1) ** 2).sum(), data)
    expected = np.zeros_like(data)
    expected[:, 2:] = 2 * data[:, 2:]
    np.testing.assert_allclose(gradient, expected)


@covers("chunk")
def test_an_index_without_a_chunk_is_an_error(platform, adapter):
    data = adapter.tensor(np.ones((5, 2)))
    for index in (3, -1):
        with pytest.raises(
            IndexError, match=rf"chunk: there is no piece {index}; 5 rows on dim 0 in pieces of 2 make 3"
        ):
            platform.chunk(data, 0, 2, index)
    with pytest.raises(IndexError, match=r"chunk: a tensor of shape \(5, 2\) has no dim 2"):
        platform.chunk(data, 2, 1, 0)
    with pytest.raises(ValueError, match=r"chunk: split_size is the size of each piece, 1 or more; got 0"):
        platform.chunk(data, 0, 0, 0)


@covers("cat", "arange", "zeros", "new_tensor", "full_like", "empty_like")
def test_making_tensors(platform, adapter):
    float32 = platform.str_to_dtype("float32")
    int32 = platform.str_to_dtype("int32")
    joined = platform.cat([adapter.tensor([[1.0], [2.0]]), adapter.tensor([[3.0], [4.0]])], dim=1)
    assert adapter.numpy(joined).tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert adapter.numpy(platform.arange(4)).tolist() == [0, 1, 2, 3]
    assert adapter.numpy(platform.arange(1, 8, 3, dtype=int32)).tolist() == [1, 4, 7]
    assert platform.arange(3, dtype=float32).dtype == float32
    zeros = platform.zeros((2, 3), dtype=int32, device="cpu")
    assert (adapter.numpy(zeros).tolist(), zeros.dtype) == ([[0, 0, 0], [0, 0, 0]], int32)
    fresh = platform.new_tensor((2, 5), float32, "cpu")
    assert (tuple(fresh.shape), fresh.dtype) == ((2, 5), float32)
    sevens = platform.full_like(zeros, 7, dtype=float32)
    assert (adapter.numpy(sevens).tolist(), sevens.dtype) == ([[7.0] * 3] * 2, float32)
    like = platform.empty_like(zeros, dtype=float32, device="cpu", pin_memory=True)
    assert (tuple(like.shape), like.dtype) == ((2, 3), float32)


def test_making_tensors_beside_the_base(platform, adapter):
    int32 = platform.str_to_dtype("int32")
    assert adapter.numpy(platform.ones((2,), dtype=int32)).tolist() == [1, 1]
    assert adapter.numpy(platform.full((2,), 5, dtype=int32)).tolist() == [5, 5]
    assert tuple(platform.empty((2, 4), dtype=int32).shape) == (2, 4)


def test_class_attributes_are_the_frameworks_own(platform, adapter):
    data = adapter.tensor([1.0, 2.0])
    assert isinstance(data, platform.Tensor)
    assert isinstance(data.dtype, platform.dtype)
    assert platform.tensor_dtype.float32 == platform.str_to_dtype("float32")
    assert adapter.numpy(platform.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert isinstance(platform.Parameter(data), platform.Tensor)
    assert isinstance(platform.Module, type)
    assert isinstance(platform.Function, type)
    assert issubclass(platform.DTensorBase, platform.Tensor)


@covers("construct_strided_slice")
@pytest.mark.parametrize(
    ("begin", "end", "stride"),
    [((0, 1), (4, 6), (2, 2)), ((1,), (3,), (1,)), ((-3, 5), (4, 0), (1, -2)), ((3, -1), (-5, -7), (-1, -1))],
)
def test_strided_slices_and_their_gradients(platform, adapter, begin, end, stride):
    data = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    where = tuple(slice(b, e, s) for b, e, s in zip(begin, end, stride))
    sliced = platform.construct_strided_slice(adapter.tensor(data), begin, end, stride)
    np.testing.assert_array_equal(adapter.numpy(sliced), data[where])
    (gradient,) = adapter.gradients(
        lambda x: (platform.construct_strided_slice(x, begin, end, stride) ** 2).sum(), data
    )
    expected = np.zeros_like(data)
    expected[where] = 2 * data[where]
    np.testing.assert_allclose(gradient, expected)


@covers("construct_strided_slice")
def test_strided_slices_that_make_no_sense_are_refused(platform, adapter):
    data = adapter.tensor(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"construct_strided_slice: .* one length, at most 2 .* got 1, 2 and 1"):
        platform.construct_strided_slice(data, (0,), (1, 1), (1,))
    with pytest.raises(ValueError, match=r"construct_strided_slice: a stride cannot be 0; got \[0\]"):
        platform.construct_strided_slice(data, (0,), (1,), (0,))


@covers("get_tensor_transform")
def test_the_layout_transformer_exists_or_says_what_to_use(platform, adapter):
    if adapter.name == "mindspore":
        assert platform.get_tensor_transform() is not None
        return
    with pytest.raises(UnsupportedMemberError, match=r"TorchPlatform.get_tensor_transform: .*DTensor.redistribute"):
        platform.get_tensor_transform()


@covers("cast_fp_tensor")
def test_casting_keeps_the_object_when_nothing_changes(platform, adapter):
    bfloat16 = platform.str_to_dtype("bfloat16")
    floating, whole = adapter.tensor([1.5], "float32"), adapter.tensor([1], "int64")
    assert platform.cast_fp_tensor(bfloat16, floating).dtype == bfloat16
    assert platform.cast_fp_tensor(floating.dtype, floating) is floating
    assert platform.cast_fp_tensor(bfloat16, whole) is whole
    assert platform.cast_fp_tensor(bfloat16, "text") == "text"


@covers("tensor_to_numpy")
def test_numpy_is_detached_and_bfloat16_becomes_float32(platform, adapter):
    array = platform.tensor_to_numpy(adapter.tensor([1.5, -2.0], "float64", requires_grad=True))
    assert (array.dtype, array.tolist()) == (np.float64, [1.5, -2.0])
    narrow = platform.tensor_to_numpy(adapter.tensor([1.5, -2.0], "bfloat16"))
    assert (narrow.dtype, narrow.tolist()) == (np.float32, [1.5, -2.0])
    with pytest.raises(TypeError, match=r"tensor_to_numpy: expected a .*Tensor, got list"):
        platform.tensor_to_numpy([1.0])


@covers("set_tensor_requires_grad")
def test_a_leaf_gets_its_gradient(platform, adapter):
    leaf = adapter.tensor([1.0, 2.0])
    assert platform.set_tensor_requires_grad(leaf) is leaf
    assert getattr(leaf, "requires_grad", None) or getattr(leaf, "_requires_grad", False)


@covers("set_tensor_requires_grad", "is_tensor", "tree_map")
def test_members_answer_on_the_class_as_on_an_instance(platform, adapter):
    cls = type(platform)
    assert cls.is_tensor(adapter.tensor([1.0]))
    assert cls.tree_map(str, [1, None]) == ["1", "None"]
    assert cls.meta_device == platform.meta_device
    assert cls.noop_context_fn is platform.noop_context_fn


def test_the_base_names_the_member_and_where_to_go():
    with pytest.raises(UnsupportedMemberError, match=r"Platform.zeros: not available; .*Instead: .*get_platform\(\)"):
        Platform.zeros((1,))
    with pytest.raises(UnsupportedMemberError, match=r"Platform.meta_device: not available"):
        _ = Platform().meta_device
