"""Every reader of a file that may come from somebody else, with good samples of what it reads.

A loader may answer with a valid record or with its own error, and do nothing else: no other exception, no warning, no
file touched, no process started, no code run, no endless loop. :func:`attempt` is the judge; an audit hook of the interpreter
watches what it does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from hyper_parallel.errors import CheckpointFileError, PlanError
from hyper_parallel.platform.torch import checkpoint_files
from security.mutate import mutated

__all__ = ["LOADERS", "Loader", "attempt", "mutated_file"]

LIMIT_S: Final = 10.0  # of computing, whatever else this machine does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """One reader."""

    name: str
    load: Callable[[Path], Any]
    is_valid: Callable[[Any], bool]
    error: type[Exception]
    samples: tuple[bytes, ...]


class Bomb:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("elsewhere",)


def _written(write: Callable[[Path], Any]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sample")
        write(path)
        return path.read_bytes()


def _weights() -> dict[str, torch.Tensor]:
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "layer.weight": shared,
        "tied.weight": shared,
        "layer.bias": torch.ones(4, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }


def _is_weights(loaded: Any) -> bool:
    """A dict of names to tensors whose bytes are all there to be read."""
    if not isinstance(loaded, dict):
        return False
    return all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and _is_readable(tensor)
        for name, tensor in loaded.items()
    )


def _is_readable(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return bool(tensor.untyped_storage().nbytes() < 2**30) and tensor.clone().shape == tensor.shape


def _checkpoint_loaders() -> Iterator[Loader]:
    for name in ("safetensors", "pt"):
        samples = [_written(lambda path, name=name: checkpoint_files.save(_weights(), path, name))]  # type: ignore[misc]
        samples.append(_written(lambda path, name=name: checkpoint_files.save({"w": torch.ones(2)}, path, name)))  # type: ignore[misc]
        if name == "pt":
            samples.append(pickle.dumps({"w": Bomb()}))
            samples.append(_written(lambda path: torch.save({"w": Bomb()}, path)))
            samples.append(_written(lambda path: torch.save(_weights(), path, _use_new_zipfile_serialization=False)))
        yield Loader(
            name=name,
            load=lambda path, name=name: checkpoint_files.load(path, name),  # type: ignore[misc]
            is_valid=_is_weights,
            error=CheckpointFileError,
            samples=tuple(samples),
        )


def _record_loader(record: Any) -> Loader:
    """A reader of one of the planner's records, from one good record."""
    kind = type(record)
    return Loader(
        name=kind.__name__.lower(),
        load=kind.load,
        is_valid=lambda loaded: isinstance(loaded, kind) and kind.load(_saved_again(loaded)) == loaded,
        error=PlanError,
        samples=(_written(record.save),),
    )


def _saved_again(record: Any) -> Path:
    path = Path(_AGAIN.name, f"again-{os.getpid()}")
    _Watched.allowed = True
    try:
        record.save(path)
    finally:
        _Watched.allowed = False
    return path


_AGAIN = tempfile.TemporaryDirectory()


def _planner_loaders() -> Iterator[Loader]:
    from security.planner_samples import small_plan, small_profile

    yield _record_loader(small_profile())
    yield _record_loader(small_plan())


LOADERS: Final[dict[str, Loader]] = {loader.name: loader for loader in (*_checkpoint_loaders(), *_planner_loaders())}


def mutated_file(seed: int, number: int) -> tuple[Loader, bytes]:
    """File ``number`` of a seed, and who reads it."""
    loader = list(LOADERS.values())[number % len(LOADERS)]
    dice = random.Random(f"{seed} {number}")
    return loader, mutated(dice.choice(loader.samples), dice)


# ------------------------------------------------------------------ the judge


class _Watched:
    """What the interpreter's audit hook saw while a loader ran."""

    is_on = False
    allowed = False
    seen: list[str] = []  # noqa: RUF012
    is_installed = False


_DANGEROUS: Final = (
    *("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen", "shutil."),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate"),
)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _Watched.is_on or _Watched.allowed:
        return
    if event == "open":
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes:
            _Watched.seen.append(f"open for writing: {args[0]!r}")
    elif event.startswith(_DANGEROUS):
        _Watched.seen.append(f"{event} {args!r}"[:200])


@contextmanager
def _watching() -> Iterator[list[str]]:
    if not _Watched.is_installed:  # an audit hook stays for the life of the process
        sys.addaudithook(_audit)
        _Watched.is_installed = True
    _Watched.seen = []
    _Watched.is_on = True
    try:
        yield _Watched.seen
    finally:
        _Watched.is_on = False


def attempt(loader: Loader, data: bytes, folder: Path) -> tuple[str, str]:
    """``("read" | "refused", "")``, or ``("wrong", why)``. The folder holds the file alone, before and after."""
    path = folder / "file"
    path.write_bytes(data)
    started = time.process_time()
    verdict, why = "read", ""
    with _watching() as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if not loader.is_valid(loader.load(path)):
                verdict, why = "wrong", "the answer is no valid record"
        except loader.error as error:
            verdict = "refused"
            if str(path) not in str(error):
                verdict, why = "wrong", f"the error does not name the file: {error}"
        except Exception as error:
            verdict, why = "wrong", f"{type(error).__name__}: {error}"
    if seen:
        verdict, why = "wrong", f"it did more than read: {seen[:3]}"
    if os.listdir(folder) != ["file"] or path.read_bytes() != data:
        verdict, why = "wrong", f"it wrote: {os.listdir(folder)}"
    if time.process_time() - started > LIMIT_S:
        verdict, why = "wrong", f"it took {time.process_time() - started:.0f} s of this processor"
    return verdict, why


def as_text(data: bytes) -> str:
    """A file for a report: short, and exact."""
    return json.dumps(data[:4000].decode("latin-1"))
