"""How fast the same write is from memory whose pages lie apart, by a plain loop and by the disk tier.

    python -m benchmarks.disk_pages --directory /scratch --output benchmarks/results/disk_pages.json

Physical memory cannot be asked for by place. But pages that are touched one after the other often lie side by side, so
two buffers that are touched in turn, some pages of one and then as many of the other, end up in runs of about that
length: 1, 4 and 16 pages here, and huge pages. How long the runs really are is read from the kernel, which tells root
alone. The loop and the tier then write the same buffer, in random order, as ``benchmarks/disk_tier.py`` does.

``requests`` is how many write requests the disk was sent meanwhile (by all programs), where ``--device`` names it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import statistics
import time
from pathlib import Path

import torch

from benchmarks.disk_tier import MIB, PAGE, Reference, Tier, filled, pages_per_run, private_memory
from hyper_parallel.config import parse_bytes
from hyper_parallel.core.activation_checkpoint.far.disk_file import aligned_memory

LEASE_BYTES = 32 * MIB
RUNS = (16, 4, 1)


def in_runs(nbytes: int, pages: int) -> tuple[memoryview, memoryview]:
    """Memory in physical runs of about ``pages`` pages, and what lies between them."""
    buffers = (private_memory(nbytes), private_memory(nbytes))
    for start in range(0, nbytes, pages * PAGE):
        for buffer in buffers:
            for at in range(start, min(start + pages * PAGE, nbytes), PAGE):
                buffer[at] = 1
    return filled(buffers[0]), buffers[1]


def requests_of(device: str | None) -> int:
    return int(Path(f"/sys/block/{device}/stat").read_text().split()[4]) if device else 0


def measure(directory: str, nbytes: int, rounds: int, device: str | None) -> list[dict[str, object]]:
    tier = Tier(directory, nbytes, LEASE_BYTES)
    # What lies between is kept: whoever asks next would get it, page by page.
    pairs = {f"touched in turns of {pages}": in_runs(nbytes, pages) for pages in RUNS}
    memories = {name: memory for name, (memory, _) in pairs.items()}
    memories["huge pages"] = filled(aligned_memory(nbytes))
    loops = {name: Reference(directory, [memory], tier.is_direct) for name, memory in memories.items()}
    tensors = {name: torch.frombuffer(memory, dtype=torch.uint8) for name, memory in memories.items()}
    rates: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    requests: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
    cases = [(who, name) for who in ("loop", "tier") for name in memories]
    for number in range(rounds + 1):
        random.shuffle(cases)
        for who, name in cases:
            tier.sources = [tensors[name][at : at + LEASE_BYTES] for at in range(0, nbytes, LEASE_BYTES)]
            time.sleep(0.05)
            before = requests_of(device)
            seconds = (loops[name] if who == "loop" else tier).write_s()
            if number:  # the first writes take fresh blocks
                rates[who, name].append(nbytes / seconds / 1e9)
                requests[who, name].append(requests_of(device) - before)
    tier.close()
    return [
        {
            "memory": name,
            "pages_per_run": pages_per_run([memories[name]]),
            "who": who,
            "write_GB_per_s": values,
            "median_GB_per_s": statistics.median(values),
            "median_requests": statistics.median(requests[who, name]) if device else None,
        }
        for (who, name), values in sorted(rates.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="a directory on the file system to measure")
    parser.add_argument("--size", default="512MiB", help="bytes of each file")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", help="the block device under it, as /sys/block names it")
    parser.add_argument("--output", help="write the numbers here as JSON")
    arguments = parser.parse_args()
    nbytes = parse_bytes(arguments.size, name="--size") // (64 * MIB) * (64 * MIB)
    if not nbytes:
        parser.error("--size must be at least 64 MiB")
    cases = measure(arguments.directory, nbytes, arguments.rounds, arguments.device)
    for case in cases:
        print(case["who"], case["memory"], *(f"{k} {case[k]}" for k in case if k.startswith(("pages", "median"))))
    if arguments.output:
        command = f"benchmarks/disk_pages.py --size {nbytes} --rounds {arguments.rounds}"
        result = {"schema": 1, "command": command, "cores": os.cpu_count(), "cases": cases}
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
