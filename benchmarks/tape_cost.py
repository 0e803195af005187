"""What recording and replaying costs the host: four blocks with tiny tensors, and the parts of that cost.

    OMP_NUM_THREADS=1 python -m benchmarks.tape_cost [--device cuda] [--rounds 40] [--case chain]

All ways take turns in one process, and the fastest of many rounds is compared, because everything else on the machine can only
add to it. On a CPU the thread's own processor time is measured; with a GPU the time until everything is issued, on a device
that was idle before. Prints a table, and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from benchmarks.host_blocks import CASES, blocks_named
from hyper_parallel.backends.torch import native

_UNMEASURED_ROUNDS = 5
_LAYERS = 4  # blocks in a row
_LENGTH = 200  # ops of a chain that shows one part


class HostClock:
    """Times calls in microseconds of the host."""

    def __init__(self, device: str) -> None:
        self._is_cpu = device == "cpu"

    def time(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """How long a call took, and what it returned."""
        if self._is_cpu:
            start = time.thread_time_ns()
            result = run()
            return (time.thread_time_ns() - start) / 1e3, result
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        result = run()
        return (time.perf_counter_ns() - begun) / 1e3, result


def recorder() -> Any:
    """The native recorder."""
    found = native.load()
    if found is None:
        raise SystemExit(f"tape_cost: there is no native recorder: {native.why_not()}")
    return found


def fastest(ways: dict[str, Callable[[], Any]], clock: HostClock, rounds: int) -> dict[str, tuple[float, float]]:
    """Forward and backward of each way, in microseconds; backward is 0 where there is no graph."""
    took: dict[str, list[tuple[float, float]]] = defaultdict(list)
    gc.collect()
    gc.disable()
    for step in range(rounds + _UNMEASURED_ROUNDS):
        for name, run in ways.items():
            forward, output = clock.time(run)
            backward = 0.0
            if output.requires_grad:
                gradient = torch.ones_like(output)
                backward = clock.time(lambda output=output, gradient=gradient: output.backward(gradient))[0]
            del output
            if step >= _UNMEASURED_ROUNDS:
                took[name].append((forward, backward))
    gc.enable()
    return {name: (min(f for f, _ in times), min(b for _, b in times)) for name, times in took.items()}


def of_a_case(name: str, device: str, clock: HostClock, rounds: int) -> dict[str, Any]:
    """A block as it is, under torch's checkpoint and from a tape."""
    blocks, x = blocks_named(name, _LAYERS, device)

    def in_a_row(call: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        output = x
        for block in blocks:
            output = call(block, output)
        return output

    found = fastest(
        {
            "plain": lambda: in_a_row(lambda block, x: block(x)),
            "torch checkpoint": lambda: in_a_row(lambda block, x: checkpoint(block, x, use_reentrant=False)),
            "tape": lambda: in_a_row(hp.checkpoint),
        },
        clock,
        rounds,
    )
    plain, torchs, tape = ([value / _LAYERS for value in times] for times in found.values())
    before = recorder().counters()["recorded_ops"]
    hp.checkpoint(blocks[0], x)
    return {
        "ops": recorder().counters()["recorded_ops"] - before,
        "plain us": [round(value) for value in plain],
        "torch checkpoint us": [round(value) for value in torchs],
        "tape us": [round(value) for value in tape],
        "forward, tape / plain": round(tape[0] / plain[0], 3),
        "backward, tape / plain": round(tape[1] / plain[1], 3),
        "step, tape / torch checkpoint": round(sum(tape) / sum(torchs), 3),
        "step, added by the tape / by torch": round((sum(tape) - sum(plain)) / (sum(torchs) - sum(plain)), 3),
    }


def of_the_parts(device: str, clock: HostClock, rounds: int) -> dict[str, float]:
    """What one region costs without an op, and what is added by an op that is recorded, a value packed, unpacked, made again."""
    x = torch.randn(8, 8, device=device).requires_grad_()
    constant = torch.randn(8, 8, device=device)
    nothing = torch.nn.Identity()

    def sines(x: torch.Tensor) -> torch.Tensor:  # each saves the output of the one before
        for _ in range(_LENGTH):
            x = torch.sin(x)
        return x

    def products(x: torch.Tensor) -> torch.Tensor:  # each saves the constant
        for _ in range(_LENGTH):
            x = x * constant
        return x

    def recorded(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        tape = recorder().Tape("tape_cost", recorder().RegionHistory(), 0, 0)
        tape.open()
        try:
            return function(constant)
        finally:
            recorder().leave()

    found = fastest(
        {
            "entry": lambda: [hp.checkpoint(nothing, x) for _ in range(_LENGTH)][-1],
            "bare": lambda: sines(constant),
            "recorded": lambda: recorded(sines),
            "sines": lambda: sines(x),
            "sines, tape": lambda: hp.checkpoint(sines, x),
            "products": lambda: products(x),
            "products, tape": lambda: hp.checkpoint(products, x),
        },
        clock,
        rounds,
    )
    entry = found["entry"][0] / _LENGTH
    record = (found["recorded"][0] - found["bare"][0]) / _LENGTH
    unpack = (found["products, tape"][1] - found["products"][1]) / _LENGTH
    return {
        "region without an op": round(entry, 2),
        "record an op": round(record, 3),
        "pack a value of the region": round(
            (found["sines, tape"][0] - found["sines"][0] - entry) / _LENGTH - record, 3
        ),
        "pack a value from outside": round(
            (found["products, tape"][0] - found["products"][0] - entry) / _LENGTH - record, 3
        ),
        "unpack": round(unpack, 3),
        "run an op again, over the bare op": round(
            (found["sines, tape"][1] - found["sines"][1] - found["bare"][0]) / _LENGTH - unpack, 3
        ),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--case", choices=CASES, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = HostClock(options.device)
    cases = {name: of_a_case(name, options.device, clock, options.rounds) for name in options.case or CASES}
    for name, numbers in cases.items():
        print(f"{name}: " + "; ".join(f"{key} {value}" for key, value in numbers.items()))
    parts = of_the_parts(options.device, clock, options.rounds)
    print("parts, us: " + "; ".join(f"{key} {value}" for key, value in parts.items()))
    print(json.dumps({"torch": torch.__version__, "device": options.device, "cases": cases, "parts_us": parts}))


if __name__ == "__main__":
    main()
