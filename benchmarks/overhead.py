"""Host cost of an active but idle engine (everything below ``min_bytes``), and of a selective region, per saved tensor or op.

    python -m benchmarks.overhead --output benchmarks/results/overhead_cpu_202611

Small tensors on CPU, so that the host's own work is all there is. Variants take turns in one process. The fastest of many short
runs is compared, because everything else on the machine can only add to it; the median is printed beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel.backends.torch import AsyncSaveOnCpu

OPS = 200


def chain(x: torch.Tensor) -> torch.Tensor:
    """Each ``sin`` saves its input: OPS saved tensors."""
    for _ in range(OPS):
        x = torch.sin(x)
    return x


def plain(x: torch.Tensor) -> None:
    chain(x).sum().backward()


def hooks(x: torch.Tensor, context: Callable[[], Any]) -> None:
    with context():
        y = chain(x)
    y.sum().backward()


def ours_selective(x: torch.Tensor, policy: Any) -> None:
    hp.checkpoint(chain, x, policy_fn=policy, preserve_rng_state=False).sum().backward()


def torch_selective(x: torch.Tensor, policy: Any) -> None:
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    y = torch_checkpoint.checkpoint(chain, x, use_reentrant=False, context_fn=context_fn, preserve_rng_state=False)
    y.sum().backward()


def torch_save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_sin = op is torch.ops.aten.sin.default
    return torch_checkpoint.CheckpointPolicy.MUST_SAVE if is_sin else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def ours_save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    is_sin = op is torch.ops.aten.sin.default
    return hp.CheckpointPolicy.MUST_SAVE if is_sin else hp.CheckpointPolicy.PREFER_RECOMPUTE


VARIANTS: dict[str, Callable[[torch.Tensor], None]] = {
    "plain": plain,
    "hooks that only detach": lambda x: hooks(
        x, lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda packed: packed)
    ),
    "ours, idle": lambda x: hooks(x, AsyncSaveOnCpu),
    "torch SAC, list": lambda x: torch_selective(x, [torch.ops.aten.sin.default]),
    "ours, list": lambda x: ours_selective(x, ["sin"]),
    "torch SAC, function": lambda x: torch_selective(x, torch_save),
    "ours, function": lambda x: ours_selective(x, ours_save),
    "torch checkpoint": lambda x: (
        torch_checkpoint.checkpoint(chain, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    ),
    "ours, recompute all": lambda x: ours_selective(x, []),
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per saved tensor (or op) of every variant."""
    x = torch.randn(4, 4, requires_grad=True)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, run in VARIANTS.items():
            start = time.perf_counter()
            run(x)
            times[name].append((time.perf_counter() - start) / OPS * 1e6)
    return {name: {"fastest": min(values), "median": statistics.median(values)} for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", default=None, help="path without suffix; .json and .md are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(args.rounds)
    idle = results["ours, idle"]["fastest"] - results["plain"]["fastest"]
    lines = ["| variant | us per saved tensor or op, fastest | median |", "|---|---|---|"]
    lines += [f"| {name} | {value['fastest']:.2f} | {value['median']:.2f} |" for name, value in results.items()]
    lines += ["", f"idle engine, hooks included: {idle:.2f} us per saved tensor over plain autograd"]
    text = "\n".join(lines)
    print(text)
    if args.output:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        with open(args.output + ".json", "w") as file:
            json.dump({"schema": 1, **facts, "ops": OPS, "us": results, "idle_us": idle}, file, indent=1)
        with open(args.output + ".md", "w") as file:
            command = f"python -m benchmarks.overhead --rounds {args.rounds}"
            file.write(f"# Host overhead\n\n- {facts}\n- command: `{command}`\n\n{text}\n")


if __name__ == "__main__":
    main()
