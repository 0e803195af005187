"""Weights to files and back, on torch.

A safetensors file holds no two names for one tensor. Tied weights are written once; the other names are kept in the
file's metadata and come back as the same tensor, so a loaded dict has every name the model has.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hyper_parallel.errors import CheckpointFileError
from hyper_parallel.platform.base.weight_files import check_format, check_safetensors, existing_file, replacing
from hyper_parallel.platform.torch.compat import DTensor
from hyper_parallel.platform.torch.state_dict import model_state_dict

__all__ = ["load", "save"]

KNOWN_FORMATS: Final = ("safetensors", "pt", "pth", "bin", "ckpt")
_ALIASES: Final = "hyper_parallel.aliases"


def save(cell: Any, file_path: str | os.PathLike[str], ckpt_format: str) -> None:
    """Write a module's state, or a dict of tensors; of a sharded model every rank must call."""
    name = check_format(ckpt_format, KNOWN_FORMATS, member="save_checkpoint")
    tensors = _plain_tensors(cell)
    write = _write_safetensors if name == "safetensors" else _write_pickled
    with replacing(file_path) as temporary:
        write(tensors, temporary)


def load(file_path: str | os.PathLike[str], ckpt_format: str) -> dict[str, torch.Tensor]:
    """Read a dict of tensors onto the host. Formats other than safetensors load weights only."""
    name = check_format(ckpt_format, KNOWN_FORMATS, member="load_checkpoint")
    path = existing_file(file_path)
    return _read_safetensors(path) if name == "safetensors" else _read_pickled(path)


def _plain_tensors(cell: Any) -> dict[str, torch.Tensor]:
    if isinstance(cell, torch.nn.Module):
        state: Mapping[str, Any] = model_state_dict(cell)
    elif isinstance(cell, Mapping):
        state = cell
    else:
        raise TypeError(f"save_checkpoint: expected a module or a dict of tensors, got {type(cell).__name__}")
    plain: dict[int, torch.Tensor] = {}
    for name, value in state.items():
        if id(value) not in plain:
            plain[id(value)] = _plain_tensor(name, value)
    return {name: plain[id(value)] for name, value in state.items()}


def _plain_tensor(name: Any, value: Any) -> torch.Tensor:
    if not isinstance(name, str) or not isinstance(value, torch.Tensor):
        raise TypeError(
            f"save_checkpoint: a weight file holds tensors under names; "
            f"{name!r} is a {type(value).__name__}. Leave it out, or make it a tensor"
        )
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if tensor.is_meta:
        raise CheckpointFileError(
            f"save_checkpoint: cannot write {name!r}; because it is on the meta device and has no values; "
            f"materialise it first (init_parameters, or load_into_param)"
        )
    return tensor


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    first_names: dict[tuple[Any, ...], str] = {}
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CheckpointFileError(
                f"save_checkpoint: cannot write {name!r}; because safetensors holds no {tensor.layout} tensor; "
                f"make it dense, or use ckpt_format='pt'"
            )
        first = first_names.setdefault(_identity(tensor), name) if tensor.numel() else name
        if first != name:
            aliases[name] = first
        else:
            # The clone gives every view bytes of its own: the format refuses tensors that overlap in memory.
            unique[name] = tensor.clone(memory_format=torch.contiguous_format) if _is_view(tensor) else tensor
    metadata = {"format": "pt"} | ({_ALIASES: json.dumps(aliases)} if aliases else {})
    try:
        save_file(unique, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise _unwritten(error) from error


def _write_pickled(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(dict(tensors), file)
    except (OSError, RuntimeError) as error:
        raise _unwritten(error) from error


def _unwritten(error: Exception) -> CheckpointFileError:
    return CheckpointFileError(
        f"save_checkpoint: cannot write the file; because {error}; the old file, if there was one, is untouched"
    )


def _is_view(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    check_safetensors(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            aliases = (file.metadata() or {}).get(_ALIASES, "{}")
    except SafetensorError as error:
        raise CheckpointFileError(f"load_checkpoint: cannot read {path}; because {error}; save it again") from error
    return tensors | _aliased(path, tensors, aliases)


def _aliased(path: Path, tensors: Mapping[str, torch.Tensor], text: str) -> dict[str, torch.Tensor]:
    """The other names of tied weights, out of the file's metadata."""
    try:
        aliases = json.loads(text)
        return {name: tensors[first] for name, first in aliases.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because its list of tied weights is broken ({type(error).__name__}: "
            f"{str(error)[:200]}); save it again"
        ) from error


def _check_archive(path: Path) -> None:
    """Raise for an archive that is cut off, damaged, or larger inside than outside: torch compresses nothing."""
    size = path.stat().st_size
    with path.open("rb") as file:
        looks_zipped = file.read(2) == b"PK"
    if size and not looks_zipped:
        return
    try:
        with zipfile.ZipFile(path) as archive:
            inside = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because it is truncated: the end of the archive is missing or damaged "
            f"({size} bytes; {error}); copy or save it again"
        ) from error
    if inside > size:
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because it is no torch file: its {size} bytes would unpack to {inside}; "
            f"save it again without compression"
        )


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            # A pickle of another protocol is either read or refused below; which one it is needs no warning before.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because it is no plain weight file: it asks to run code or to build "
            f"objects, which is never done ({str(error).splitlines()[0]}); save its state dict instead"
        ) from error
    except Exception as error:  # bytes of any kind end in an error of any kind
        raise CheckpointFileError(
            f"load_checkpoint: cannot read {path}; because it is no torch file, or a damaged one ({error}); "
            f"copy or save it again"
        ) from error
    wrong = _not_tensors(loaded)
    if wrong is not None:
        raise CheckpointFileError(
            f"load_checkpoint: cannot use {path}; because a weight file is a dict of names to tensors and {wrong}; "
            f"save a plain state dict"
        )
    return dict(loaded)


def _not_tensors(loaded: Any) -> str | None:
    if not isinstance(loaded, Mapping):
        return f"this holds a {type(loaded).__name__}"
    for name, value in loaded.items():
        if not isinstance(value, torch.Tensor):
            return f"{name!r} is a {type(value).__name__}"
    return None
