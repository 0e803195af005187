"""How fast the disk tier is, beside plain sequential I/O on the same file system, and whether it hides behind compute.

    python benchmarks/disk_tier.py --directory /scratch --output benchmarks/results/disk_tier.json

What is compared
----------------
*Loop*, the reference: what ``dd bs=64M`` does: one thread writes, then reads, one file from end to end in 64 MiB calls
from and into page-aligned memory. The bytes are random, because storage may treat the zeros that ``dd`` is usually fed
with specially. *Tier*: leases of ``--lease`` bytes, all queued at once, until the last completion, of tensors that begin
anywhere in a page at a multiple of 64 bytes, as the C allocator places them, and back into buffers that the tier asked
for, as the engine does. *fio*, where it is installed: the same 64 MiB calls of one thread, and its usual 16 requests
of 1 MiB in flight.

The loop writes from the very pages of the tier's tensors. How far apart the pages of a program's memory lie decides how
many pieces and requests its bytes become, and made the same call between 2 and 5 GB/s fast (``disk_pages.py``); whoever
asks for memory first tends to get the small pieces that others left. The loop with ordinary memory of its own
(``loop_own``), which it gets after the tier, and with memory in huge pages (``loop_huge``), the best there is, are
shown as well. ``pages_per_run`` says how many pages lie side by side, where the kernel tells.

Each reads right after its own write: a virtual disk may have a cache behind it, which no flag here reaches, and which
makes the same read several times slower when other I/O came between. Loop and tier keep their memory from round to
round; a read into memory that the process has only just got from the kernel is shown apart (``fresh``), for both.

All use the same flags: direct I/O where the file system has it, so that neither the page cache nor its dirty pages
stand in for the disk; all files are written once before, because the first write into fresh blocks also pays for the
file system's own books, and a training run pays that in its first step only. Where there is no direct I/O, all go
through the page cache, the writes end with fsync, and the cached pages are dropped before the reads. Rounds go through
all of them in turn, and who begins alternates, so that a slow minute of a shared disk hits all.

Overlap: matrix products in the main thread, one lease written after each, as a forward does. The timeline holds when
compute was busy and when a worker was; the numbers are the lengths of these sets and of their intersection.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from hyper_parallel.backends.torch.devices import HostBackend
from hyper_parallel.config import SwapConfig, parse_bytes
from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.disk_file import aligned_memory, residue_of
from hyper_parallel.core.activation_checkpoint.far.disk_workers import DiskCompletion
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory
from hyper_parallel.core.activation_checkpoint.far.tier import Lease

MIB = 2**20
PAGE = 4096
FIO_OPTIONS = {
    "fio_64M": ("--bs=64M", "--ioengine=psync"),
    "fio_1M_x16": ("--bs=1M", "--ioengine=libaio", "--iodepth=16"),
}
CALL_BYTES = 64 * MIB
FRAME_BITS = 2**55 - 1  # of an entry in /proc/self/pagemap: the physical page
Transfer: TypeAlias = Callable[[int, list[memoryview], int], int]  # os.pwritev, os.preadv
TARGET = 0.8


class Reference:
    """Sequential I/O of one thread on a nameless file, from and into ``memory``."""

    def __init__(self, directory: str, memory: list[memoryview], direct: bool) -> None:
        self.memory, self.direct = memory, direct
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        if direct:
            self._fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self._fd, 0, total_bytes(memory))

    def write_s(self) -> float:
        seconds = self._move(os.pwritev, self.memory)
        began = time.perf_counter()
        if not self.direct:
            os.fsync(self._fd)
        return seconds + time.perf_counter() - began

    def read_s(self) -> float:
        drop_cache(self._fd)
        return self._move(os.preadv, self.memory)

    def read_fresh_s(self) -> float:
        drop_cache(self._fd)
        return self._move(os.preadv, [private_memory(total_bytes(self.memory))])

    def _move(self, call: Transfer, memory: list[memoryview]) -> float:
        calls, offset = calls_of(memory), 0
        began = time.perf_counter()
        for views in calls:
            moved = call(self._fd, views, offset)
            assert moved == total_bytes(views), "the system moved a part only"
            offset += moved
        return time.perf_counter() - began


class Tier:
    """Far memory with a disk and nothing else, called as a record of the engine calls it."""

    def __init__(self, directory: str, nbytes: int, lease_bytes: int) -> None:
        self.backend = HostBackend()
        self.far = FarMemory(SwapConfig(tiers=("disk",), disk_path=directory))
        (self.disk,) = (tier for tier in self.far._tiers if isinstance(tier, DiskTier))
        self.sources: list[torch.Tensor] = []
        self.pages: list[memoryview] = []  # the same memory, from its first whole page on
        for _, at in zip(range(nbytes // lease_bytes), itertools.cycle(range(0, PAGE, 64))):
            block = torch.randint(0, 256, (lease_bytes + 2 * PAGE,), dtype=torch.uint8)
            first = -residue_of(self.backend.host_view(block)) % PAGE
            self.sources.append(block[first + at : first + at + lease_bytes])
            self.pages.append(self.backend.host_view(block[first : first + lease_bytes]))
        self.targets: list[torch.Tensor] = []
        self.leases: list[Lease] = []
        for source in self.sources:
            lease = self.far.reserve(self.backend, len(source))
            assert isinstance(lease, Lease), f"the file system refused {len(source)} bytes: {lease}"
            self.leases.append(lease)

    @property
    def is_direct(self) -> bool:
        return self.disk.is_direct

    def write(self, number: int) -> DiskCompletion:
        end = self.far.write(self.leases[number], self.sources[number], backend=self.backend, stream=None, ready=None)
        assert isinstance(end, DiskCompletion)
        return end

    def write_s(self) -> float:
        began = time.perf_counter()
        for end in [self.write(number) for number in range(len(self.leases))]:
            end.wait()
        if not self.is_direct:
            os.fsync(self.disk._file._fd)
        return time.perf_counter() - began

    def read_fresh_s(self) -> float:
        self.targets.clear()
        return self.read_s()

    def read_s(self) -> float:
        drop_cache(self.disk._file._fd)
        began = time.perf_counter()
        self.targets = self.targets or [self.far.allocate(self.backend, lease) for lease in self.leases]
        ends = [
            self.far.read(lease, target, backend=self.backend, stream=None, ready=None)
            for lease, target in zip(self.leases, self.targets)
        ]
        for end in ends:
            end.wait()
        seconds = time.perf_counter() - began
        for source, target in zip(self.sources, self.targets):
            assert torch.equal(source, target), "the tier returned other bytes"
            target.zero_()
        return seconds

    def close(self) -> None:
        for lease in self.leases:
            self.far.release(lease, None)
        self.far.close()


class Fio:
    """The benchmark that everybody knows, on a file of the same size."""

    def __init__(self, directory: str, nbytes: int, direct: bool, *options: str) -> None:
        self._file = tempfile.NamedTemporaryFile(dir=directory, prefix="fio-")  # noqa: SIM115 - lives as long as this
        self._command = ["fio", "--name=all", f"--filename={self._file.name}", f"--size={nbytes}"]
        self._command += [f"--direct={int(direct)}", "--end_fsync=1", "--output-format=json", *options]
        self.nbytes = nbytes

    def write_s(self) -> float:
        return self._seconds("write")

    def read_s(self) -> float:
        return self._seconds("read")

    def _seconds(self, way: str) -> float:
        done = subprocess.run([*self._command, f"--rw={way}"], check=True, capture_output=True, text=True)
        return self.nbytes / float(json.loads(done.stdout)["jobs"][0][way]["bw_bytes"])


def private_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def filled(memory: memoryview) -> memoryview:
    for at in range(0, len(memory), CALL_BYTES):
        memory[at : at + CALL_BYTES] = os.urandom(CALL_BYTES)
    return memory


def total_bytes(views: list[memoryview]) -> int:
    return sum(len(view) for view in views)


def calls_of(memory: list[memoryview]) -> list[list[memoryview]]:
    """All of ``memory``, cut and gathered into calls of at most ``CALL_BYTES``."""
    most_views = os.sysconf("SC_IOV_MAX")
    calls: list[list[memoryview]] = []
    for view in memory:
        for at in range(0, len(view), CALL_BYTES):
            part = view[at : at + CALL_BYTES]
            if not calls or len(calls[-1]) == most_views or total_bytes(calls[-1]) + len(part) > CALL_BYTES:
                calls.append([])
            calls[-1].append(part)
    return calls


def pages_per_run(memory: list[memoryview]) -> float | None:
    """How many pages of page-aligned ``memory`` lie side by side, on average; None where the kernel does not say."""
    pages, runs = 0, 0
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open("/proc/self/pagemap", "rb", buffering=0))
        except OSError:
            return None
        for view in memory:
            first = ctypes.addressof(ctypes.c_char.from_buffer(view)) // PAGE
            file.seek(8 * first)
            frames = [entry & FRAME_BITS for entry in array.array("Q", file.read(8 * (len(view) // PAGE)))]
            if not any(frames):  # only root is told
                return None
            pages += len(frames)
            runs += 1 + sum(after != before + 1 for before, after in itertools.pairwise(frames))
    return pages / runs


def drop_cache(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def ratios(rates: dict[str, float], reference: str) -> dict[str, float]:
    ways = ("write", "read", "read_fresh")
    return {way: rates[f"tier_{way}"] / rates[f"{reference}_{way}"] for way in ways if f"{reference}_{way}" in rates}


def throughput(directory: str, nbytes: int, lease_bytes: int, rounds: int) -> dict[str, object]:
    tier = Tier(directory, nbytes, lease_bytes)
    contestants: dict[str, Reference | Tier | Fio] = {
        "loop": Reference(directory, tier.pages, tier.is_direct),
        "tier": tier,
        "loop_own": Reference(directory, [filled(private_memory(nbytes))], tier.is_direct),
        "loop_huge": Reference(directory, [filled(aligned_memory(nbytes))], tier.is_direct),
    }
    if shutil.which("fio"):
        for name, options in FIO_OPTIONS.items():
            contestants[name] = Fio(directory, nbytes, tier.is_direct, *options)
    first = {f"{name}_write": nbytes / one.write_s() / 1e9 for name, one in contestants.items()}
    samples: dict[str, list[float]] = collections.defaultdict(list)
    for number in range(rounds):
        # Who goes first alternates: the second finds whatever the first left in caches behind the disk.
        for name, one in list(contestants.items())[:: 1 if number % 2 else -1]:
            samples[f"{name}_write"].append(nbytes / one.write_s() / 1e9)
            if name in ("loop", "tier") and not isinstance(one, Fio):
                samples[f"{name}_read_fresh"].append(nbytes / one.read_fresh_s() / 1e9)
            samples[f"{name}_read"].append(nbytes / one.read_s() / 1e9)
    runs = {name: pages_per_run(one.memory) for name, one in contestants.items() if isinstance(one, Reference)}
    tier.close()
    median = {name: statistics.median(values) for name, values in samples.items()}
    best = {name: max(values) for name, values in samples.items()}
    references = [name for name in contestants if name != "tier"]
    return {
        "direct_io": tier.is_direct,
        "pages_per_run": runs,
        "first_write_GB_per_s": first,
        "samples_GB_per_s": samples,
        "median_GB_per_s": median,
        "best_GB_per_s": best,
        "ratio_of_medians": {name: ratios(median, name) for name in references},
        "ratio_of_bests": {name: ratios(best, name) for name in references},
        "target": TARGET,
    }


def covered(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length_ms(spans: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans) / 1e3


def intersection(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    both = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return [(start, end) for start, end in both if start < end]


def overlap(directory: str, nbytes: int, lease_bytes: int) -> dict[str, object]:
    tier = Tier(directory, nbytes, lease_bytes)
    tier.write_s()
    alone_io_ms = tier.write_s() * 1e3
    torch.set_num_threads(1)  # one core computes; a worker's system calls use another
    matrix = torch.randn(1024, 1024)

    def compute(products: int) -> tuple[float, float]:
        start = time.perf_counter() * 1e6
        for _ in range(products):
            matrix @ matrix
        return start, time.perf_counter() * 1e6

    compute(8)
    start, end = compute(16)
    # As much compute as I/O and half again: a forward long enough to hide its copies.
    products = max(1, round(1.5 * alone_io_ms * 1e3 / len(tier.leases) / ((end - start) / 16)))
    alone_ms = length_ms([compute(products) for _ in tier.leases])
    began = time.perf_counter()
    computing, ends = [], []
    for number in range(len(tier.leases)):
        computing.append(compute(products))
        ends.append(tier.write(number))
    for end_of in ends:
        end_of.wait()
    total_ms = (time.perf_counter() - began) * 1e3
    tier.disk._workers.wait_until_idle()
    writing = covered([(one.start_us, one.end_us) for one in ends])
    computing = covered(computing)
    hidden_ms = length_ms(intersection(computing, writing))
    origin = computing[0][0]
    tier.close()
    return {
        "compute_alone_ms": alone_ms,
        "io_alone_ms": alone_io_ms,
        "together_ms": total_ms,
        "compute_busy_ms": length_ms(computing),
        "io_busy_ms": length_ms(writing),
        "overlap_ms": hidden_ms,
        "hidden_share_of_io": hidden_ms / length_ms(writing),
        "timeline_ms": {
            "compute": [[round((a - origin) / 1e3, 3), round((b - origin) / 1e3, 3)] for a, b in computing],
            "io": [[round((a - origin) / 1e3, 3), round((b - origin) / 1e3, 3)] for a, b in writing],
        },
    }


def file_system(directory: str) -> str:
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, about = line.partition(" - ")
        mount = place.split()[4]
        if Path(directory).resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, about.split()[0])
    return best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="a directory on the file system to measure")
    parser.add_argument("--size", default="1GiB", help="bytes of each file")
    parser.add_argument("--lease", default="32MiB", help="bytes of each lease")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", help="write the numbers here as JSON")
    arguments = parser.parse_args()
    lease_bytes = parse_bytes(arguments.lease, name="--lease")
    nbytes = parse_bytes(arguments.size, name="--size") // CALL_BYTES * CALL_BYTES
    if not 0 < lease_bytes <= nbytes or nbytes % lease_bytes or lease_bytes % PAGE:
        parser.error(
            f"--size ({nbytes} in whole 64 MiB) must be a multiple of --lease ({lease_bytes}), and that of {PAGE}"
        )
    result: dict[str, object] = {
        "schema": 3,
        "command": f"benchmarks/disk_tier.py --size {nbytes} --lease {lease_bytes} --rounds {arguments.rounds}",
        "machine": {
            "kernel": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "file_system": file_system(arguments.directory),
        },
        "throughput": (rates := throughput(arguments.directory, nbytes, lease_bytes, arguments.rounds)),
        "overlap": (hiding := overlap(arguments.directory, nbytes, lease_bytes)),
    }
    print(
        f"direct I/O: {rates['direct_io']}; pages per run: {rates['pages_per_run']}; {arguments.rounds} rounds, GB/s:"
    )
    for name, value in sorted(rates["median_GB_per_s"].items()):  # type: ignore[attr-defined]
        print(f"  {name:17s} median {value:6.2f}   best {rates['best_GB_per_s'][name]:6.2f}")  # type: ignore[index]
    for kind in ("medians", "bests"):
        for name, ways in rates[f"ratio_of_{kind}"].items():  # type: ignore[attr-defined]
            shares = ", ".join(f"{way} {value:.0%}" for way, value in ways.items())
            print(f"  tier / {name}, {kind}: {shares} (target {TARGET:.0%})")
    print(
        f"overlap: compute {hiding['compute_busy_ms']:.0f} ms (alone {hiding['compute_alone_ms']:.0f}), "
        f"I/O {hiding['io_busy_ms']:.0f} ms (alone {hiding['io_alone_ms']:.0f}), "
        f"together {hiding['together_ms']:.0f} ms; "
        f"{hiding['hidden_share_of_io']:.0%} of the I/O time lies inside compute"
    )
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
