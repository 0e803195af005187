"""What a machine can do, measured: the cost of copies in RAM, the disk. No framework is imported here."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Final

from hyper_parallel.errors import DiskTierError

__all__ = ["Accelerator", "DiskSpeed", "disk_speed", "memory_copy_bytes_per_second"]

_DISK_PROBE_BYTES: Final = 64 * 2**20
_CHUNK_BYTES: Final = 4 * 2**20
_COPY_PROBE_BYTES: Final = 32 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device that the framework sees."""

    name: str
    memory_bytes: int = 0  # 0, here and below: not known
    free_bytes: int = 0
    out_bytes_per_second: float = 0.0
    in_bytes_per_second: float = 0.0
    copy_seconds: float = 0.0
    pin_seconds_per_byte: float = 0.0
    shared_out_bytes_per_second: float = 0.0  # while all devices of this host copy; 0: there is one
    shared_in_bytes_per_second: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """One file system, written and read past the page cache where it allows that."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    free_bytes: int
    is_direct: bool


def memory_copy_bytes_per_second() -> float:
    """A copy from RAM to RAM, one thread: what a host's "link" is."""
    import numpy as np  # takes long, and few commands copy

    source = np.ones(_COPY_PROBE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return float(_COPY_PROBE_BYTES / max(statistics.median(times), 1e-9))


def disk_speed(folder: str | os.PathLike[str], nbytes: int = _DISK_PROBE_BYTES) -> DiskSpeed:
    """Write and read a file of ``nbytes`` in ``folder``; it is gone afterwards."""
    try:
        handle, path = tempfile.mkstemp(prefix=".hyper-parallel-probe-", dir=folder)
        os.close(handle)
    except OSError as error:
        raise DiskTierError(
            f"disk probe: cannot write to {os.fspath(folder)}: {error.strerror}. Name a directory that can be written to."
        ) from None
    try:
        return _probed(path, nbytes)
    finally:
        os.unlink(path)


def _probed(path: str, nbytes: int) -> DiskSpeed:
    count = max(1, nbytes // _CHUNK_BYTES)
    with mmap.mmap(-1, _CHUNK_BYTES) as buffer:  # page-aligned, as direct access asks
        buffer.write(os.urandom(_CHUNK_BYTES))
        descriptor, is_direct = _opened(path, os.O_WRONLY)
        with _closing(descriptor):
            started = time.perf_counter()
            for _ in range(count):
                os.write(descriptor, buffer)
            os.fsync(descriptor)
            written = time.perf_counter() - started
        descriptor, reads_direct = _opened(path, os.O_RDONLY)
        with _closing(descriptor):
            if not reads_direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            for _ in range(count):
                os.readv(descriptor, [buffer])
            read = time.perf_counter() - started
    place = os.statvfs(path)
    return DiskSpeed(
        write_bytes_per_second=count * _CHUNK_BYTES / max(written, 1e-9),
        read_bytes_per_second=count * _CHUNK_BYTES / max(read, 1e-9),
        free_bytes=place.f_bavail * place.f_frsize,
        is_direct=is_direct and reads_direct,
    )


def _opened(path: str, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except OSError:  # a file system without direct access, such as tmpfs
        return os.open(path, flags), False


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
