"""Breaks files, from the outside (bytes) and from the inside (valid containers with wrong contents). Pure and seeded.

Most flips of a byte are caught by the first check of a reader. So half of the mutations go through the container: the
JSON of a record or of a safetensors header is changed and written back with right lengths, the pickle inside a zip archive
is changed and packed again with a right checksum. Those reach the code behind the first check.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any, Final

__all__ = ["mutated"]

_HEADER_BYTES: Final = 8
_NUMBERS: Final = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -0.0, 0.5, 1e-320, 1e309, float("nan"))
_TEXTS: Final = ("", "0", "é\ud7ff\x00", "../../elsewhere", "/etc/passwd", "__class__", "F32", "x" * 5000)
_TREES: Final = ([], {}, [[]], [0, 2**62], [-1, 5], {"a": {"b": []}}, ["", None], [1e309, -1e309])
_ODD: Final[tuple[Any, ...]] = (None, True, False, *_NUMBERS, *_TEXTS, *_TREES)


def mutated(sample: bytes, dice: random.Random) -> bytes:
    """``sample``, broken in one to four places."""
    data = sample
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        inner = dice.choice((_in_record, _in_safetensors, _in_archive, None, None, None))
        changed = None if inner is None else inner(data, dice)
        data = dice.choice(_BYTES)(data, dice) if changed is None else changed
    return data


# ------------------------------------------------------------------ bytes


def _place(data: bytes, dice: random.Random) -> int:
    """Headers and ends matter more than the middle."""
    if dice.random() < 0.4:
        return dice.randrange(min(len(data), 64) + 1)
    if dice.random() < 0.3:
        return max(0, len(data) - dice.randrange(64))
    return dice.randrange(len(data) + 1)


def _flip(data: bytes, dice: random.Random) -> bytes:
    broken = bytearray(data or b"\0")
    for _ in range(dice.choice((1, 1, 3, 20))):
        broken[min(_place(data, dice), len(broken) - 1)] ^= 1 << dice.randrange(8)
    return bytes(broken)


def _truncate(data: bytes, dice: random.Random) -> bytes:
    return data[: _place(data, dice)]


def _insert(data: bytes, dice: random.Random) -> bytes:
    at = _place(data, dice)
    junk = dice.choice(
        (dice.randbytes(dice.randrange(1, 40)), b"\0" * dice.randrange(1, 300), b"[" * 3000, b"\xff" * 8)
    )
    return data[:at] + junk + data[at:]


def _overwrite(data: bytes, dice: random.Random) -> bytes:
    at, size = _place(data, dice), dice.choice((1, 4, 8, 64))
    return data[:at] + dice.choice((b"\0", b"\xff", dice.randbytes(1))) * size + data[at + size :]


def _move(data: bytes, dice: random.Random) -> bytes:
    at, size, to = _place(data, dice), dice.randrange(1, 200), _place(data, dice)
    return data[:to] + data[at : at + size] + data[to:]


def _replace_all(data: bytes, dice: random.Random) -> bytes:
    return dice.choice(
        (
            b"",
            b"\0",
            b"{}",
            b"[]",
            b"PK\x03\x04",
            b"\x80\x02.",
            b"null",
            dice.randbytes(200),
            b"\x02" + b"\0" * 7 + b"{}",
        )
    )


_BYTES: Final = (_flip, _flip, _truncate, _insert, _overwrite, _move, _replace_all)


# ------------------------------------------------------------------ inside the container


def _in_record(data: bytes, dice: random.Random) -> bytes | None:
    """A JSON file with a value changed."""
    if data[:1] not in (b"{", b"["):
        return None
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return _dumped(_tree(tree, dice))


def _in_safetensors(data: bytes, dice: random.Random) -> bytes | None:
    """A safetensors file whose header is valid JSON of the right length, and wrong."""
    length = int.from_bytes(data[:_HEADER_BYTES], "little")
    if data[_HEADER_BYTES : _HEADER_BYTES + 1] != b"{" or not 0 < length <= len(data) - _HEADER_BYTES:
        return None
    try:
        header = json.loads(data[_HEADER_BYTES : _HEADER_BYTES + length])
    except (ValueError, RecursionError):
        return None
    changed = _tree(header, dice)
    if isinstance(changed, dict) and isinstance(changed.get("__metadata__"), dict) and dice.random() < 0.4:
        _metadata(changed["__metadata__"], dice)
    text = _dumped(changed)
    return len(text).to_bytes(_HEADER_BYTES, "little") + text + data[_HEADER_BYTES + length :]


def _metadata(metadata: dict[str, Any], dice: random.Random) -> None:
    """A value that holds JSON itself is changed as JSON, and stays a string."""
    name = dice.choice([*metadata, "hyper_parallel.aliases"])
    try:
        inner = json.loads(metadata.get(name, "{}"))
    except (ValueError, TypeError, RecursionError):
        inner = {}
    metadata[name] = _dumped(_tree(inner, dice)).decode(errors="replace")


def _in_archive(data: bytes, dice: random.Random) -> bytes | None:
    """A zip archive with an entry changed, renamed, doubled, dropped or compressed, and right checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # whatever a broken archive makes of it
        return None
    if not entries:
        return None
    at = dice.randrange(len(entries))
    name, content = entries[at]
    how = dice.choice(("change", "change", "change", "rename", "double", "drop", "compress"))
    if how == "change":
        entries[at] = (name, dice.choice(_BYTES)(content, dice))
    elif how == "rename":
        entries[at] = (
            dice.choice(("../../elsewhere", "/elsewhere", "a/data.pkl", "a/version", name + "x")),
            content,
        )
    elif how == "double":
        entries.append((name + "2", content))
    elif how == "drop":
        del entries[at]
    else:
        entries[at] = (name, b"\0" * dice.choice((10**4, 10**6)))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED if how == "compress" else zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return packed.getvalue()


def _tree(tree: Any, dice: random.Random) -> Any:
    """JSON with one value replaced, removed, added or copied from elsewhere in it."""
    places = list(_places(tree))
    if not places or dice.random() < 0.02:
        return dice.choice(_ODD)
    holder, key = dice.choice(places)
    how = dice.random()
    if how < 0.55:
        holder[key] = _nudged(holder[key], dice)
    elif how < 0.7:
        del holder[key]
    elif how < 0.85:
        other, its_key = dice.choice(places)
        holder[key] = json.loads(json.dumps(other[its_key])) if its_key in _keys(other) else None
    elif isinstance(holder, dict):
        holder[dice.choice(("", "extra", "__metadata__", "schema", "../x", "dtype"))] = dice.choice(_ODD)
    else:
        holder.insert(key, dice.choice(_ODD))
    return tree


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _nudged(value: Any, dice: random.Random) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.5:
        return dice.choice((value + 1, value - 1, -value, value * 2**33, float(value)))
    if isinstance(value, str) and dice.random() < 0.4:
        return dice.choice((value[1:], value + "\0", value.upper(), value * 2))
    if dice.random() < 0.05:
        deep: Any = 0
        for _ in range(dice.choice((50, 900))):
            deep = [deep]
        return deep
    return dice.choice(_ODD)


def _places(tree: Any) -> Any:
    todo = [tree]
    while todo:
        holder = todo.pop()
        if isinstance(holder, dict | list):
            for key in _keys(holder):
                yield holder, key
                todo.append(holder[key])


def _dumped(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", errors="surrogatepass")
