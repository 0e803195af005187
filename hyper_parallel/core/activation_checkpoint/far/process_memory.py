"""How much host memory this process may use, as the kernel and its control groups say it.

A container's limit is not in ``/proc/meminfo``: a process that sizes a cache by the machine is killed by the container. So the
answer is the smallest of what the machine has available and what every control group above this process still allows,
in version 1 and version 2 of that interface, and in machines that mount both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from hyper_parallel.core.activation_checkpoint.adapter import tensor_adapter
from hyper_parallel.core.processes import launched_local_processes

__all__ = ["available_memory_bytes", "count_local_processes", "default_host_limit_bytes"]

# Version 1 says "no limit" with a number close to 2**63, rounded to pages.
_UNLIMITED_BYTES: Final = 2**60


class _Files(NamedTuple):
    """The names one version of the interface gives its files."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]  # lines of memory.stat: page cache, which the kernel drops under pressure


_VERSION_1: Final = _Files(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable=("total_inactive_file", "total_active_file"),
)
# memory.high does not kill, but throttles until the process hardly moves: for us it is a limit like memory.max.
_VERSION_2: Final = _Files(
    limits=("memory.max", "memory.high"), usage="memory.current", reclaimable=("inactive_file", "active_file")
)


def default_host_limit_bytes(local_processes: int | None = None, *, root: Path = Path("/")) -> int:
    """Half of what this process may use; the processes of one job on this host share that half.

    ``local_processes``: how many they are; None: as many as :func:`count_local_processes` knows of now.
    """
    return available_memory_bytes(root=root) // 2 // (local_processes or count_local_processes())


def count_local_processes() -> int:
    """How many processes of this job are on this host: as the launcher says, else as the ranks of its group told one another.

    A rank that has not said yet where it is counts as one of this host.
    """
    launched = launched_local_processes()
    return launched if launched is not None else tensor_adapter().local_processes()


def available_memory_bytes(*, root: Path = Path("/")) -> int:
    """The least of what the machine and every control group above this process leave to it."""
    return max(0, min(_machine_bytes(root), *_group_bytes(root)))


def _machine_bytes(root: Path) -> int:
    lines = _read(root / "proc/meminfo").splitlines()
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    known = [sizes[name] for name in ("MemTotal", "MemAvailable") if name in sizes]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    yield _UNLIMITED_BYTES
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controlled, mount in mounts:
            if controlled != (
                _VERSION_1 if "memory" in controllers.split(",") else None if controllers else _VERSION_2
            ):
                continue
            # A container often sees its own group at the mount point while the path is the one outside: then the
            # directories named by the path are missing, and the mount point itself holds the limit.
            group = mount / path.lstrip("/")
            for directory in (group, *group.parents):
                if directory.is_relative_to(mount):
                    yield _left_bytes(directory, controlled)


def _mounts(root: Path) -> Iterator[tuple[_Files, Path]]:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount_part, _, kind = line.partition(" - ")
        fields, about = mount_part.split(), kind.split()
        if len(fields) < 5 or len(about) < 3:
            continue
        mount = root / fields[4].lstrip("/")
        if about[0] == "cgroup2":
            yield _VERSION_2, mount
        elif about[0] == "cgroup" and "memory" in about[2].split(","):
            yield _VERSION_1, mount


def _left_bytes(directory: Path, files: _Files) -> int:
    limits = [_number(_read(directory / name)) for name in files.limits]
    limit = min((limit for limit in limits if limit is not None), default=_UNLIMITED_BYTES)
    if limit >= _UNLIMITED_BYTES:
        return _UNLIMITED_BYTES
    used = _number(_read(directory / files.usage)) or 0
    statistics = dict(line.split(" ", 1) for line in _read(directory / "memory.stat").splitlines() if " " in line)
    cached = sum(_number(statistics.get(name, "")) or 0 for name in files.reclaimable)
    return limit - max(0, used - cached)


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
