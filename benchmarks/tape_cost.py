"""What recording and replaying costs the host, per op.

    OMP_NUM_THREADS=1 python -m benchmarks.tape_cost [--device cuda] [--rounds 15]

A chain of 8 x 8 float32 ``mm``, ``silu`` and ``add`` under autograd, one thread. All ways are interleaved in one process; each
number is the median over rounds. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.backends.torch import native

_LENGTH = 100  # triples of ops in one region


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Three small ops, many times."""
    for _ in range(_LENGTH):
        x = torch.nn.functional.silu(x @ weight) + x
    return x


def microseconds(run: Callable[[], None], device: str) -> float:
    """How long one call takes."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if native.load() is None:
        raise SystemExit(f"tape_cost: there is no native recorder: {native.why_not()}")
    x = torch.randn(8, 8, device=options.device, requires_grad=True)
    weight = (torch.randn(8, 8, device=options.device) * 0.1).requires_grad_()
    ops = 3 * _LENGTH
    forwards: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: chain(x, weight),
        "torch checkpoint": lambda: checkpoint(chain, x, weight, use_reentrant=False),
        "tape": lambda: hp.checkpoint(chain, x, weight),
    }
    found: dict[str, list[float]] = {f"{name}, {part}": [] for name in forwards for part in ("forward", "step")}
    for step in range(options.rounds + 3):
        for name, forward in forwards.items():
            took = {
                f"{name}, forward": microseconds(lambda run=forward: (run(), None)[1], options.device),
                f"{name}, step": microseconds(lambda run=forward: run().sum().backward(), options.device),
            }
            if step >= 3:
                for key, value in took.items():
                    found[key].append(value / ops)
    recorder = native.load()
    assert recorder is not None, "asked for above"
    constant, alone = x.detach(), {"bare": [], "recorded": []}
    for step in range(options.rounds + 3):
        for name in alone:
            tape = recorder.Tape("tape_cost", recorder.Belief(), 0, 0)
            if name == "recorded":
                tape.open()
            took = microseconds(lambda: (chain(constant, weight.detach()), None)[1], options.device) / ops
            if name == "recorded":
                recorder.leave()
            if step >= 3:
                alone[name].append(took)
    found |= {f"{name}, without autograd": values for name, values in alone.items()}
    medians = {key: round(statistics.median(values), 3) for key, values in found.items()}
    stats = hp.stats()
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "device": options.device,
                "us_per_op": medians,
                "step, tape / torch checkpoint": round(medians["tape, step"] / medians["torch checkpoint, step"], 3),
                "recording us per op, medians": round(
                    medians["recorded, without autograd"] - medians["bare, without autograd"], 3
                ),
                "recording us per op, fastest": round(min(alone["recorded"]) - min(alone["bare"]), 3),
                "regions_from_tape": stats.regions_from_tape,
            }
        )
    )


if __name__ == "__main__":
    main()
