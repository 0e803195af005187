"""Frozen records to JSON and back, strictly: every key known, every value of its declared type, nothing executed.

A file is data from elsewhere. It is bounded in size, read as plain JSON, and each record checks itself again when it is
built, so that a wrong number is found where it is read and not where it is used.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import json
import math
import os
import stat
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from hyper_parallel.errors import PlanError

__all__ = ["as_json", "from_json", "load_record", "require", "save_record"]

MOST_FILE_BYTES: Final = 256 * 2**20

T = TypeVar("T")


def require(is_true: bool, text: str) -> None:
    """A record's check of itself."""
    if not is_true:
        raise ValueError(text)


def _is_finite(number: float) -> bool:
    """JSON knows integers that no float can hold."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def as_json(value: Any) -> Any:
    """A record as plain JSON values. Fields that hold their default are left out."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: as_json(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
        }
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_json(kind: Any, data: Any, *, where: str) -> Any:
    """A value of type ``kind`` out of JSON values; ``where`` is the path that an error names."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(kind) if part is not type(None))
        return None if data is None else from_json(inner, data, where=where)
    if origin is tuple:
        require(isinstance(data, list), f"{where}: expected a list, got {_short(data)}")
        item = typing.get_args(kind)[0]
        return tuple(from_json(item, value, where=f"{where}[{at}]") for at, value in enumerate(data))
    if origin is dict:
        require(isinstance(data, dict), f"{where}: expected an object, got {_short(data)}")
        item = typing.get_args(kind)[1]
        return {key: from_json(item, value, where=f"{where}.{key}") for key, value in data.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        known = [member.value for member in kind]
        require(data in known, f"{where}: expected one of {', '.join(map(str, known))}, got {_short(data)}")
        return kind(data)
    if dataclasses.is_dataclass(kind):
        return _record_from_json(kind, data, where)
    return _plain_from_json(kind, data, where)


def _record_from_json(kind: Any, data: Any, where: str) -> Any:
    require(isinstance(data, dict), f"{where}: expected an object, got {_short(data)}")
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    require(not unknown, f"{where}: unknown {', '.join(unknown[:8])}; known are {', '.join(fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in data and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    require(not missing, f"{where}: missing {', '.join(missing)}")
    return kind(**{name: from_json(hints[name], value, where=f"{where}.{name}") for name, value in data.items()})


def _plain_from_json(kind: Any, data: Any, where: str) -> Any:
    if kind is float:
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        require(is_number and _is_finite(data), f"{where}: expected a finite number, got {_short(data)}")
        return float(data)
    is_right = isinstance(data, kind) and (kind is bool or not isinstance(data, bool))
    require(is_right, f"{where}: expected {kind.__name__}, got {_short(data)}")
    return data


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def save_record(record: Any, path: str | os.PathLike[str], *, schema: str) -> None:
    """Write a record as JSON; a reader of ``path`` sees the whole file or the one before.

    A link is followed, and what is no regular file (``/dev/null``, ``/dev/stdout``, a pipe) is written to, never replaced.
    """
    target = Path(path)
    text = json.dumps({"schema": schema, **as_json(record)}, indent=1, allow_nan=False)
    try:
        _replace(target, text + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None  # not the name of the temporary file


def _replace(target: Path, text: str) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(target))
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _text_of(target: Path, what: str) -> str:
    """A regular file of a bounded size: reading a pipe would wait for ever."""
    try:
        status = target.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PlanError(f"{what}.load: cannot read {target}: it is not a file")
        if status.st_size > MOST_FILE_BYTES:
            raise PlanError(
                f"{what}.load: {target} has {status.st_size} bytes; more than {MOST_FILE_BYTES} is no file of ours"
            )
        return target.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{what}.load: cannot read {target}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{what}.load: {target} is not a {what} that can be read: {error}") from None


Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


def load_record(
    kind: type[T], path: str | os.PathLike[str], *, schema: str, older: Mapping[str, Upgrade] = MappingProxyType({})
) -> T:
    """Read what :func:`save_record` wrote.

    ``older``: schemas of earlier versions, each with a function that turns its JSON object into one of ``schema``.
    """
    what = kind.__name__
    target = Path(path)
    text = _text_of(target, what)
    try:
        data = json.loads(text)
        require(isinstance(data, dict), f"expected an object, got {_short(data)}")
        found = data.pop("schema", None)
        if isinstance(found, str) and found in older:
            data = older[found](data)
        else:
            require(found == schema, f"schema is {found!r}, this version reads {schema!r}")
        return typing.cast(T, from_json(kind, data, where=what))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PlanError(
            f"{what}.load: {target} is not a {what} that can be read: {error}. Write it again with {what}.save(path)."
        ) from error
