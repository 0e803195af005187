"""How fast the disk tier is, beside plain sequential I/O on the same file system, and whether it hides behind compute.

    python benchmarks/disk_tier.py --directory /scratch --output benchmarks/results/disk_tier.json

What is compared
----------------
*Reference*: what ``dd bs=64M`` does: one thread writes, then reads, one file from end to end in 64 MiB calls from and
into page-aligned memory. The bytes are random, because storage may treat the zeros that ``dd`` is usually fed with
specially. *Tier*: leases of ``--lease`` bytes of ordinary torch CPU tensors (64-byte aligned) with random bytes, all
queued at once, until the last completion.
Each reads right after its own write: a virtual disk may have a cache behind it, which no flag here reaches, and which
makes the same read several times slower when other I/O came between. Both keep their memory from round to round; a
read into memory that the process has only just got from the kernel is shown apart (``fresh``), for both.

Both use the same flags: direct I/O where the file system has it, so that neither the page cache nor its dirty pages
stand in for the disk; both files are written once before, because the first write into fresh blocks also pays for the
file system's own books, and a training run pays that in its first step only. Where there is no direct I/O, the
reference and the tier both go through the page cache, the writes end with fsync, and the cached pages are dropped
before the reads. Rounds alternate between the two, so that a slow minute of a shared disk hits both.

Overlap: matrix products in the main thread, one lease written after each, as a forward does. The timeline holds when
compute was busy and when a worker was; the numbers are the lengths of these sets and of their intersection.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from hyper_parallel.config import parse_bytes
from hyper_parallel.core.activation_checkpoint.far.disk import DiskTier
from hyper_parallel.core.activation_checkpoint.far.host import HostBudget
from hyper_parallel.core.activation_checkpoint.far.tier import Lease

MIB = 2**20
CALL_BYTES = 64 * MIB
TARGET = 0.8


class CpuBackend:
    """The CPU as a device: what was called has happened."""

    name = "cpu"
    is_host_memory = True

    def current_stream(self) -> None:
        return None

    def wait_event(self, stream: None, event: None) -> None:
        return None

    def event_is_done(self, event: None) -> bool:
        return True

    def synchronize_event(self, event: None) -> None:
        return None

    def host_view(self, flat: torch.Tensor) -> memoryview:
        return memoryview(flat.numpy())


class Reference:
    """Sequential I/O on a nameless file of the same size."""

    def __init__(self, directory: str, nbytes: int, direct: bool) -> None:
        self.nbytes, self.direct = nbytes, direct
        self._directory = directory
        self._fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        if direct:
            self._fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(self._fd, 0, nbytes)
        self._memory = memoryview(mmap.mmap(-1, nbytes))
        for offset in range(0, nbytes, CALL_BYTES):
            self._memory[offset : offset + CALL_BYTES] = os.urandom(CALL_BYTES)

    def write_s(self) -> float:
        began = time.perf_counter()
        for offset in range(0, self.nbytes, CALL_BYTES):
            assert os.pwritev(self._fd, [self._memory[offset : offset + CALL_BYTES]], offset) == CALL_BYTES
        if not self.direct:
            os.fsync(self._fd)
        return time.perf_counter() - began

    def read_s(self, memory: memoryview | None = None) -> float:
        memory = self._memory if memory is None else memory
        drop_cache(self._fd)
        began = time.perf_counter()
        for offset in range(0, self.nbytes, CALL_BYTES):
            assert os.preadv(self._fd, [memory[offset : offset + CALL_BYTES]], offset) == CALL_BYTES
        return time.perf_counter() - began

    def read_fresh_s(self) -> float:
        memory = memoryview(mmap.mmap(-1, self.nbytes))
        for offset in range(0, self.nbytes, 4096):
            memory[offset] = 1
        return self.read_s(memory)


class Tier:
    """The disk tier under the same load, from ordinary tensors."""

    def __init__(self, directory: str, nbytes: int, lease_bytes: int) -> None:
        self.backend = CpuBackend()
        self.tier = DiskTier(directory, limit_bytes=None, budget=HostBudget(2**30))
        self.sources = [torch.randint(0, 256, (lease_bytes,), dtype=torch.uint8) for _ in range(nbytes // lease_bytes)]
        self.targets: list[torch.Tensor] = []
        self.leases: list[Lease] = []

    def lend(self) -> None:
        for source in self.sources:
            lease = self.tier.reserve(self.backend, len(source))
            assert isinstance(lease, Lease), f"the file system refused {len(source)} bytes: {lease}"
            self.leases.append(lease)

    def write_s(self) -> float:
        began = time.perf_counter()
        ends = [
            self.tier.write(lease, source, backend=self.backend, stream=None, ready=None)
            for lease, source in zip(self.leases, self.sources)
        ]
        for end in ends:
            end.wait()
        if not self.tier.is_direct:
            os.fsync(self.tier._file._fd)
        return time.perf_counter() - began

    def read_fresh_s(self) -> float:
        self.targets = [torch.ones_like(source) for source in self.sources]
        return self.read_s()

    def read_s(self) -> float:
        drop_cache(self.tier._file._fd)
        targets = self.targets
        began = time.perf_counter()
        ends = [
            self.tier.read(lease, target, backend=self.backend, stream=None, ready=None)
            for lease, target in zip(self.leases, targets)
        ]
        for end in ends:
            end.wait()
        seconds = time.perf_counter() - began
        for source, target in zip(self.sources, targets):
            assert torch.equal(source, target), "the tier returned other bytes"
            target.zero_()
        return seconds


def drop_cache(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def ratio(rates: dict[str, float], way: str) -> float:
    return rates[f"tier_{way}"] / rates[f"loop_{way}"]


def throughput(directory: str, nbytes: int, lease_bytes: int, rounds: int) -> dict[str, object]:
    tier = Tier(directory, nbytes, lease_bytes)
    tier.lend()
    reference = Reference(directory, nbytes, tier.tier.is_direct)
    first = {"loop_write": nbytes / reference.write_s() / 1e9, "tier_write": nbytes / tier.write_s() / 1e9}
    fresh = {}
    for name, one in (("loop_read", reference), ("tier_read", tier)):
        one.write_s()
        fresh[name] = nbytes / one.read_fresh_s() / 1e9
    samples: dict[str, list[float]] = {name: [] for name in ("loop_write", "loop_read", "tier_write", "tier_read")}
    for number in range(rounds):
        # Who goes first alternates: the second finds whatever the first left in caches behind the disk.
        for kind, one in (("loop", reference), ("tier", tier))[:: 1 if number % 2 else -1]:
            samples[f"{kind}_write"].append(nbytes / one.write_s() / 1e9)
            samples[f"{kind}_read"].append(nbytes / one.read_s() / 1e9)
    tier.tier.close()
    median = {name: statistics.median(values) for name, values in samples.items()}
    best = {name: max(values) for name, values in samples.items()}
    return {
        "direct_io": tier.tier.is_direct,
        "first_write_GB_per_s": first,
        "fresh_memory_read_GB_per_s": fresh,
        "samples_GB_per_s": samples,
        "median_GB_per_s": median,
        "best_GB_per_s": best,
        "ratio_of_medians": {way: ratio(median, way) for way in ("write", "read")},
        "ratio_of_bests": {way: ratio(best, way) for way in ("write", "read")},
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
    tier.lend()
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
    for lease, source in zip(tier.leases, tier.sources):
        computing.append(compute(products))
        ends.append(tier.tier.write(lease, source, backend=tier.backend, stream=None, ready=None))
    for end_of in ends:
        end_of.wait()
    total_ms = (time.perf_counter() - began) * 1e3
    tier.tier._workers.wait_until_idle()
    writing = covered([(one.start_us, one.end_us) for one in ends])
    computing = covered(computing)
    hidden_ms = length_ms(intersection(computing, writing))
    origin = computing[0][0]
    tier.tier.close()
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
    if not 0 < lease_bytes <= nbytes or nbytes % lease_bytes:
        parser.error(f"--size ({nbytes} in whole 64 MiB) must be a multiple of --lease ({lease_bytes})")
    result: dict[str, object] = {
        "schema": 1,
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
    print(f"direct I/O: {rates['direct_io']}; {arguments.rounds} rounds, GB/s:")
    for name, value in sorted(rates["median_GB_per_s"].items()):  # type: ignore[attr-defined]
        print(f"  {name:12s} median {value:6.2f}   best {rates['best_GB_per_s'][name]:6.2f}")  # type: ignore[index]
    for name, value in rates["fresh_memory_read_GB_per_s"].items():  # type: ignore[attr-defined]
        print(f"  {name:12s} {value:6.2f}  into fresh memory, once")
    for kind in ("medians", "bests"):
        for way, value in rates[f"ratio_of_{kind}"].items():  # type: ignore[attr-defined]
            print(f"  tier / reference, {way}, {kind}: {value:.0%} (target {TARGET:.0%})")
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
