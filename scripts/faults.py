"""The fault table, as one command: every call site × every fault, tried, and what came of it.

    python scripts/faults.py --output benchmarks/results/faults_cpu_202611.md

A cell says how many trials there were and what came of them, or why the fault cannot happen there. Exit status: 0 every promise
was kept, 1 not (the cell says which one), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")

HEADER = """# The fault table

What becomes of a training step when something under it fails. Each trial runs a step with one fault in it (the k-th call
of a site fails, for every k, or for ten evenly spread ones), then the same step without. **Every trial** was checked for: a
clear error or a step that is bitwise right; no record, far memory, device byte, descriptor, thread or file left; the next step
bitwise right. The faults stand at the real borders: the allocator and copies of the device, the kernel's file calls and
limits, real signals, real processes.

{about}

"""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("faults.md"), help="the table")
    options = parser.parse_args()
    import torch
    from faults.table import CELLS, FAULTS, ROWS, Cell
    from rich.console import Console
    from rich.progress import track

    torch.set_num_threads(1)
    texts: dict[tuple[str, str], str] = {}
    trials = broken = 0
    started = time.monotonic()
    for key, cell in track(CELLS.items(), "cells", console=Console(stderr=True)):
        if not isinstance(cell, Cell):
            texts[key] = f"— {cell}"
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                outcomes = cell.run(pathlib.Path(folder))
            trials += sum(outcomes.values())
            texts[key] = "; ".join(f"{count} × {text}" for text, count in outcomes.most_common())
            if not set(outcomes) <= cell.allowed:
                raise AssertionError(f"not allowed: {sorted(set(outcomes) - cell.allowed)}")
        except Exception as error:
            broken += 1
            texts[key] = f"**BROKEN**: {type(error).__name__}: {str(error)[:200]}"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    about = (
        f"{trials} trials in {len(CELLS)} cells ({sum(isinstance(cell, Cell) for cell in CELLS.values())} with experiments), "
        f"{broken} broken, {time.monotonic() - started:.0f} s; Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {commit.stdout.strip()}. Command: `python scripts/faults.py --output <file>`."
    )
    lines = [HEADER.format(about=about)]
    for fault, words in FAULTS.items():
        lines.append(f"## {fault}: {words}\n\n| call site | what came of it |\n|---|---|")
        lines += [f"| {row.name} | {texts[row.name, fault]} |" for row in ROWS]
        lines.append("")
    options.output.write_text("\n".join(lines).rstrip() + "\n")
    print(f"{about} {options.output}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
