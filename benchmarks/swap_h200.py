"""What swapping costs where the host is the limit: a launch-bound stack and a mixture of experts, against what people use.

    python -m benchmarks.swap_h200 [--cases launch moe] [--rounds 5] [--output FOLDER]
    python -m benchmarks.swap_h200 --simulated      # every code path, on a CPU

Each case is a process of its own; all ways take turns, as in ``budgets_h200``. TRL's offloading is measured where TRL can be
imported, or where ``TRL_OFFLOAD_FILE`` names its one file; without it the line says so. The thresholds of TRL's offloading and of
``swap_wrapper`` are both 4 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from benchmarks.budgets_h200 import Bench, wrapped
from benchmarks.offloading import trl_offloading
from hyper_parallel import SwapConfig
from hyper_parallel.testing import simulated_accelerator

_THRESHOLD_BYTES = 4 * 2**20
_ATTENTION = {"*::sdpa": "swap", "*::*": "recompute"}
_MATMULS_TOO = {"*::sdpa": "swap", "*::mm": "swap", "*::*": "recompute"}


def _swap_everything(layers: nn.ModuleList) -> contextlib.AbstractContextManager[Any]:
    config = SwapConfig(min_bytes=_THRESHOLD_BYTES)
    return wrapped(layers, lambda layer: hp.swap_wrapper(layer, swap_config=config))


class SwapBench(Bench):
    """One case under the ways that swap, beside torch's."""

    file = "swap.jsonl"

    def __init__(self, name: str, output: Path | None) -> None:
        super().__init__(name, output)
        self.modes["attention swapped, rest recomputed"] = lambda _: hp.apply_rules(self.model, _ATTENTION)
        self.modes["attention and matmuls swapped"] = lambda _: hp.apply_rules(self.model, _MATMULS_TOO)
        self.modes["swap_wrapper, 4 MiB"] = _swap_everything
        offloading = trl_offloading() if torch.cuda.is_available() else None
        if offloading is None:
            self.emit(mode="TRL, 4 MiB", error="TRL, or a GPU for it, cannot be had here")
        else:
            settings = {"use_pin_memory": True, "use_streams": True, "min_offload_size": _THRESHOLD_BYTES}
            self.modes["TRL, 4 MiB"] = lambda _: offloading(**settings)


def main() -> None:
    """Measure the cases, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["launch", "moe"], choices=["launch", "moe", "lora"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    if options.simulated:
        with simulated_accelerator():
            SwapBench("tiny", options.output).rounds(2, 1)
    elif len(options.cases) == 1:
        torch.manual_seed(0)
        SwapBench(options.cases[0], options.output).rounds(options.rounds, options.steps)
    else:
        for case in options.cases:
            command = [sys.executable, "-m", "benchmarks.swap_h200", "--cases", case]
            command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            command += [] if options.output is None else ["--output", str(options.output)]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
