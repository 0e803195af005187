"""Weight files: written whole or not at all, and looked at before they are trusted. Knows no framework.

A save goes to a temporary name in the same folder, reaches the disk, and is then renamed over the old file, so that at
every moment the path names one whole file. A read first tells apart what went wrong: no file, a file of another kind,
or one that ends too early.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import CheckpointFileError

__all__ = ["check_format", "check_safetensors", "existing_file", "replacing"]

_HEADER_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format itself."""


def check_format(ckpt_format: str, known: tuple[str, ...], *, member: str) -> str:
    """``ckpt_format`` in lower case, if it is one of ``known``."""
    name = ckpt_format.lower() if isinstance(ckpt_format, str) else ckpt_format
    if name not in known:
        raise ValueError(f"{member}: unknown ckpt_format {ckpt_format!r}; known are {', '.join(known)}")
    return name


@contextlib.contextmanager
def replacing(file_path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path to write to; rename it over ``file_path`` if the block ends well, else remove it."""
    target = Path(os.path.realpath(file_path))  # of a link, the file: the link stays
    if not target.parent.is_dir():
        raise CheckpointFileError(f"save_checkpoint: cannot write {target}; because its folder does not exist; make it")
    if target.is_dir():
        raise CheckpointFileError(f"save_checkpoint: cannot write {target}; because it is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise CheckpointFileError(f"save_checkpoint: cannot write {target}; because it is no regular file; name one")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _rename_over(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _rename_over(temporary: Path, target: Path) -> None:
    # mkstemp makes private files; a weight file has the permissions that any new file of this process would have.
    mask = os.umask(0)
    os.umask(mask)
    temporary.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~mask)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def existing_file(file_path: str | os.PathLike[str]) -> Path:
    """The path, if there is a file."""
    path = Path(file_path)
    if not path.exists():
        raise CheckpointFileError(f"load_checkpoint: cannot read {path}; because there is no such file")
    if not path.is_file():
        raise CheckpointFileError(f"load_checkpoint: cannot read {path}; because it is not a file")
    return path


def check_safetensors(path: Path) -> None:
    """Raise unless ``path`` is a safetensors file with all its bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_HEADER_LENGTH_BYTES + 1)
        if len(prefix) <= _HEADER_LENGTH_BYTES:
            raise _truncated(path, f"it has {size} bytes, less than a header")
        length = int.from_bytes(prefix[:_HEADER_LENGTH_BYTES], "little")
        if length > _MAX_HEADER_BYTES or prefix[_HEADER_LENGTH_BYTES:] != b"{":
            raise _foreign(path)
        if size < _HEADER_LENGTH_BYTES + length:
            raise _truncated(path, f"its header alone needs {_HEADER_LENGTH_BYTES + length} bytes and it has {size}")
        file.seek(_HEADER_LENGTH_BYTES)
        header = file.read(length)
    wanted = _HEADER_LENGTH_BYTES + length + _data_bytes(path, header)
    if size < wanted:
        raise _truncated(path, f"its header promises {wanted} bytes and it has {size}")


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        entries: dict[str, Any] = json.loads(header)
        return max(
            (int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise _foreign(path) from error


def _truncated(path: Path, evidence: str) -> CheckpointFileError:
    return CheckpointFileError(
        f"load_checkpoint: cannot read {path}; because it is truncated: {evidence}; copy or save it again"
    )


def _foreign(path: Path) -> CheckpointFileError:
    return CheckpointFileError(
        f"load_checkpoint: cannot read {path}; because it is not a safetensors file; "
        f"give ckpt_format for what it is (a torch file: 'pt', a MindSpore file: 'ckpt')"
    )
