"""Weights to files and back, on MindSpore.

A safetensors file holds no two names for one tensor. Tied weights are written once; the other names are kept in the
file's metadata, as on torch, so each platform reads the other's files. A ``ckpt`` file is MindSpore's own: a protobuf,
which never runs code. Its records are read one by one, so that a missing end is seen and no size limit is met.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import mindspore
import numpy as np
from mindspore.train import checkpoint_pb2

from hyper_parallel.errors import CheckpointFileError
from hyper_parallel.platform.base.weight_files import check_format, check_safetensors, existing_file, replacing
from hyper_parallel.platform.mindspore.parameters import is_meta
from hyper_parallel.platform.mindspore.state_dict import model_state_dict
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["load", "save"]

KNOWN_FORMATS: Final = ("safetensors", "ckpt")
_ALIASES: Final = "hyper_parallel.aliases"
_RECORD: Final = b"\x0a"
"""The byte that opens every record of a MindSpore checkpoint: field 1, of known length."""
_SLICE_BYTES: Final = 512 * 1024 * 1024
"""A protobuf message holds less than 2 GiB; MindSpore itself cuts larger tensors at this size."""
_SAFE_NAMES: Final = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
"""safetensors' names of dtypes, and MindSpore's."""


def save(cell: Any, file_path: str | os.PathLike[str], ckpt_format: str) -> None:
    """Write a cell's state, or a dict of tensors."""
    name = check_format(ckpt_format, KNOWN_FORMATS, member="save_checkpoint")
    tensors = _plain_tensors(cell)
    write = _write_safetensors if name == "safetensors" else _write_ckpt
    with replacing(file_path) as temporary:
        try:
            write(tensors, temporary)
        except (OSError, RuntimeError) as error:
            raise CheckpointFileError(
                f"save_checkpoint: cannot write the file; because {error}; the old file, if there was one, is untouched"
            ) from error


def load(file_path: str | os.PathLike[str], ckpt_format: str) -> dict[str, Any]:
    """Read a dict of tensors onto the host; neither format can run code."""
    name = check_format(ckpt_format, KNOWN_FORMATS, member="load_checkpoint")
    path = existing_file(file_path)
    return _read_safetensors(path) if name == "safetensors" else _read_ckpt(path)


def _plain_tensors(cell: Any) -> dict[str, Any]:
    if isinstance(cell, mindspore.nn.Cell):
        state: Mapping[Any, Any] = model_state_dict(cell, is_full=True)
    elif isinstance(cell, Mapping):
        state = cell
    else:
        raise TypeError(f"save_checkpoint: expected a cell or a dict of tensors, got {type(cell).__name__}")
    plain: dict[int, Any] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, mindspore.Tensor):
            raise TypeError(
                f"save_checkpoint: a weight file holds tensors under names; "
                f"{name!r} is a {type(value).__name__}. Leave it out, or make it a tensor"
            )
        if is_meta(value):
            raise CheckpointFileError(
                f"save_checkpoint: cannot write {name!r}; because it is on the meta device and has no values; "
                f"materialise it first (init_parameters, or load_into_param)"
            )
        if id(value) not in plain:
            plain[id(value)] = detached(value).contiguous()
    return {name: plain[id(value)] for name, value in state.items()}


def _raw(tensor: Any) -> bytes:
    # Viewed as bytes on the way: numpy has no bfloat16, and a copy keeps the array's memory alive.
    return np.ascontiguousarray(tensor.asnumpy()).tobytes()


def _dtype_name(tensor: Any) -> str:
    name = str(tensor.dtype).rpartition(".")[2].lower().removesuffix("_")
    for safe, ours in _SAFE_NAMES.items():
        if ours == name:
            return safe
    raise CheckpointFileError(
        f"save_checkpoint: cannot write a tensor of {tensor.dtype}; because a weight file knows no such dtype; "
        f"known are {', '.join(_SAFE_NAMES.values())}"
    )


def _layout(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Every tensor once, and the other names of those that have several."""
    unique: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        first = first_names.setdefault(id(tensor), name)
        if first == name:
            unique[name] = tensor
        else:
            aliases[name] = first
    return unique, aliases


def _write_safetensors(tensors: Mapping[str, Any], path: Path) -> None:
    unique, aliases = _layout(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "ms"} | ({_ALIASES: json.dumps(aliases)} if aliases else {})}
    # The format wants wide dtypes first, so that every tensor lies at a multiple of its element size.
    ordered = sorted(unique.items(), key=lambda item: (-int(item[1].itemsize), item[0]))
    offset = 0
    for name, tensor in ordered:
        length = int(np.prod(tensor.shape, dtype=int)) * int(tensor.itemsize)
        header[name] = {
            "dtype": _dtype_name(tensor),
            "shape": [int(size) for size in tensor.shape],
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(_raw(tensor))


def _read_safetensors(path: Path) -> dict[str, Any]:
    check_safetensors(path)
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            metadata = header.pop("__metadata__", None) or {}
            tensors = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                tensors[name] = _tensor(entry["dtype"], tuple(entry["shape"]), file.read(end - begin))
            aliases = json.loads(metadata.get(_ALIASES, "{}"))
            return tensors | {name: tensors[first] for name, first in aliases.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because its header is damaged ({error}); save it again"
        ) from error


def _tensor(safe_dtype: str, shape: tuple[int, ...], raw: bytes) -> Any:
    dtype = getattr(mindspore, _SAFE_NAMES[safe_dtype])
    if dtype == mindspore.bfloat16:
        # The upper half of a float32 is a bfloat16: widening and casting back changes nothing.
        wide = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        return mindspore.Tensor(wide.reshape(shape)).to(dtype)
    array = np.frombuffer(raw, np.dtype(_SAFE_NAMES[safe_dtype])).reshape(shape)
    return mindspore.Tensor(array.copy())


def _write_ckpt(tensors: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        for name, tensor in tensors.items():
            raw = _raw(tensor)
            for start in range(0, max(1, len(raw)), _SLICE_BYTES):
                file.write(_ckpt_record(name, tensor, raw[start : start + _SLICE_BYTES]))


def _ckpt_record(name: str, tensor: Any, content: bytes) -> bytes:
    checkpoint = checkpoint_pb2.Checkpoint()
    value = checkpoint.value.add()
    value.tag = name
    value.tensor.dims.extend(int(size) for size in tensor.shape)
    value.tensor.tensor_type = str(tensor.dtype)
    value.tensor.tensor_content = content
    serialised: bytes = checkpoint.SerializeToString()
    return serialised


def _read_ckpt(path: Path) -> dict[str, Any]:
    pieces: dict[str, list[Any]] = {}
    try:
        for record in _ckpt_records(path):
            value = checkpoint_pb2.Checkpoint.Value()
            value.ParseFromString(record)
            pieces.setdefault(value.tag, []).append(value.tensor)
        return {name: _ckpt_tensor(found) for name, found in pieces.items()}
    except CheckpointFileError:
        raise
    except Exception as error:  # bytes of any kind end in an error of any kind
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because it is no MindSpore checkpoint, or a damaged one ({error}); "
            f"copy or save it again"
        ) from error


def _ckpt_tensor(pieces: list[Any]) -> Any:
    names = {ours: safe for safe, ours in _SAFE_NAMES.items()}
    shape = tuple(int(size) for size in pieces[0].dims)
    raw = b"".join(piece.tensor_content for piece in pieces)
    # MindSpore writes a scalar as one row of nothing.
    shape = () if shape == (0,) and raw else shape
    return _tensor(names[pieces[0].tensor_type.lower()], shape, raw)


def _ckpt_records(path: Path) -> Iterator[bytes]:
    """The records of the file: each is a byte that opens it, a length, and so many bytes."""
    size = path.stat().st_size
    if size == 0:
        raise _truncated(path, "it has no bytes")
    with path.open("rb") as file:
        while opening := file.read(1):
            if opening != _RECORD:
                raise CheckpointFileError(
                    f"load_checkpoint: cannot read {path}; because it is no MindSpore checkpoint; "
                    f"give ckpt_format for what it is ('safetensors')"
                )
            length = _varint(file, path)
            if file.tell() + length > size:
                raise _truncated(path, f"a record promises {file.tell() + length} bytes and it has {size}")
            yield file.read(length)


def _varint(file: BinaryIO, path: Path) -> int:
    value = 0
    for place in range(10):
        byte = file.read(1)
        if not byte:
            raise _truncated(path, "it ends inside a length")
        value |= (byte[0] & 0x7F) << (7 * place)
        if byte[0] < 0x80:
            return value
    raise CheckpointFileError(
        f"load_checkpoint: cannot read {path}; because it is no MindSpore checkpoint: a length has too many bytes; "
        f"copy or save it again"
    )


def _truncated(path: Path, evidence: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"load_checkpoint: cannot read {path}; because it is truncated: {evidence}; copy or save it again"
    )
