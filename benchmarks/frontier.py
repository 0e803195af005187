"""Time against memory, every mode in turn, one process, ratios to "none" of the same run.

    python -m benchmarks.frontier --output benchmarks/results/frontier_h200_202611     # all of it, under eight minutes

**act** is the peak of active bytes minus weights and gradients. Modes are interleaved: every round runs each of them, and
medians over all rounds are compared. Peers that take half a minute to pin their memory run in the first round only, and a
recipe written by hand runs only when it is asked for (``--mode``) where a plan for the same memory exists. Loss and
gradient norm must agree with "none". Results are written after every case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

import torch

import hyper_parallel as hp
from benchmarks.frontier_modes import modes_for
from benchmarks.frontier_plot import frontier_svg
from benchmarks.models import CASES, Case, build, make_step
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.report.trace import write_chrome_trace

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How often a case is measured, and which modes leave a timeline."""

    rounds: int
    steps: int
    traced: tuple[str, ...] = ()


SCHEDULES = {
    "stack-8k": Schedule(rounds=2, steps=2, traced=("ours planned 5.2",)),
    "stack-32k": Schedule(rounds=2, steps=2, traced=("ours planned 7.8",)),
    "llama-8k": Schedule(rounds=2, steps=3, traced=("ours 8.4",)),
    "llama-32k": Schedule(rounds=2, steps=2),
    "moe-4k": Schedule(rounds=2, steps=4),
    "stack-small": Schedule(rounds=2, steps=8, traced=("ours mixed",)),
}
SLOW = frozenset({"save_on_cpu", "TRL offload"})


class Stopwatch:
    """Step times by device events, so that the host is never held inside a round."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def lap(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self.pairs.append((start, end))

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self.pairs]


def grad_norm(model: torch.nn.Module) -> float:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads])))


def run_mode(model: Any, layers: Any, step: Any, mode: Any, *, warmup: int, steps: int) -> dict[str, Any]:
    """One mode: warm-up steps, the last of which is checked, then timed ones, over which the peak is read."""
    with mode(model, layers):
        for _ in range(warmup - 1):
            step()
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss = step()
        torch.cuda.synchronize()
        checks = {"loss": float(loss), "grad_norm": grad_norm(model)}
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = hp.stats()
        watch = Stopwatch()
        host_start = time.perf_counter()
        for _ in range(steps):
            with watch.lap():
                step()
        host_ms = (time.perf_counter() - host_start) / steps * 1e3
        times = watch.milliseconds()
    memory = torch.cuda.memory_stats()
    after = hp.stats()
    torch._C._host_emptyCache()  # what a peer pinned must not take the host memory of the next mode
    fixed = sum(parameter.nbytes + parameter.grad.nbytes for parameter in model.parameters())
    return {
        **checks,
        "ms": times,
        "host_ms": host_ms,
        "act_gib": (memory["active_bytes.all.peak"] - fixed) / GIB,
        "allocated_gib": (memory["allocated_bytes.all.peak"] - fixed) / GIB,
        "reserved_gib": memory["reserved_bytes.all.peak"] / GIB,
        "exposed_copy_ms": (after.exposed_copy_us - before.exposed_copy_us) / 1e3 / steps,
        "hidden_copy_ms": (after.hidden_copy_us - before.hidden_copy_us) / 1e3 / steps,
        "swapped_gib": (after.swapped_out_bytes - before.swapped_out_bytes) / steps / GIB,
        "misses": (after.misses - before.misses) / steps,
        "late_loads": (after.late_loads - before.late_loads) / steps,
        "pinned_gib": after.pinned_bytes / GIB,
        "pinned_live_peak_gib": sum(t.peak_live_bytes for t in after.tiers if t.name == "pinned") / GIB,
    }


def record_timeline(model: Any, layers: Any, step: Any, mode: Any, path: str) -> None:
    """One step as a trace: copies out and back, stalls, and forward and backward of every layer."""
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((name, event))

    def mark_backward(output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda _: mark("backward"))

    with mode(model, layers):
        step()
        handles = [layer.register_forward_hook(lambda *_: mark("forward")) for layer in layers]
        for layer in layers:
            handles.append(layer.register_forward_hook(lambda _, __, output: mark_backward(output)))
        with hp.SwapManager().record_timeline() as spans:
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            marks.append(("forward", base))
            step()
            mark("backward")
        for handle in handles:
            handle.remove()
    torch.cuda.synchronize()
    moments = [(name, base.elapsed_time(event) * 1e3) for name, event in marks]
    compute = [
        LinkSpan(track="compute", start_us=before[1], end_us=after[1], nbytes=0)
        for before, after in itertools.pairwise(moments)
    ]
    write_chrome_trace(path, [*spans, *compute])


def measure(case: Case, names: list[str] | None, schedule: Schedule, trace_prefix: str | None = None) -> dict[str, Any]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    model, layers = build(case, device, dtype)
    step = make_step(case, model, device, dtype)
    step()
    results: dict[str, list[dict[str, Any]]] = {}
    modes = modes_for(case)
    planned = {name.replace("ours planned", "ours") for name in modes if name.startswith("ours planned")}
    wanted = set(modes) - planned if names is None else {"none", *names}
    chosen = [name for name in modes if name in wanted]
    for round_index in range(schedule.rounds):
        for name in chosen:
            is_slow = name in SLOW
            if is_slow and round_index:
                continue
            warmup, steps = (1, 1) if is_slow else (2 if round_index == 0 else 1, schedule.steps)
            try:
                row = run_mode(model, layers, step, modes[name], warmup=warmup, steps=steps)
            except Exception as error:  # a peer that fails is a result too
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
                gc.collect()
                torch.cuda.empty_cache()
            results.setdefault(name, []).append(row)
            print(f"{case.name} round {round_index} {name}: {_brief(row)}", flush=True)
    summary = {name: _summary(rows, results["none"]) for name, rows in results.items()}
    for name in schedule.traced if trace_prefix is not None else ():
        if name in chosen:
            path = f"{trace_prefix}_{case.name}_{name.replace(' ', '-')}.json"
            try:
                record_timeline(model, layers, step, modes[name], path)
            except Exception as error:  # the numbers are worth more than the picture
                print(f"{path}: {type(error).__name__}: {error}", flush=True)
    del model, layers, step
    gc.collect()
    torch.cuda.empty_cache()
    hp.SwapManager().reset()
    return {"case": case.__dict__, "modes": summary}


def _brief(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    return (
        f"{statistics.median(row['ms']):.1f} ms, act {row['act_gib']:.2f} GiB, exposed {row['exposed_copy_ms']:.1f} ms"
    )


def _summary(rows: list[dict[str, Any]], none_rows: list[dict[str, Any]]) -> dict[str, Any]:
    if any("error" in row for row in rows):
        return rows[0]
    none_ms = statistics.median(ms for row in none_rows for ms in row["ms"])
    all_ms = [ms for row in rows for ms in row["ms"]]
    summary = {key: max(row[key] for row in rows) for key in rows[0] if key not in ("ms", "loss", "grad_norm")}
    summary |= {
        "ms_median": statistics.median(all_ms),
        "ratio": statistics.median(all_ms) / none_ms,
        "ms": all_ms,
        "loss": [row["loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
        "grad_norm_relative_gap": max(
            abs(row["grad_norm"] - other["grad_norm"]) / other["grad_norm"] for row in rows for other in none_rows
        ),
    }
    return summary


def table(result: dict[str, Any]) -> str:
    lines = [
        f"### {result['case']['name']}",
        "",
        "| mode | × none | act GiB | reserved GiB | swapped GiB | exposed ms | misses | late | pinned GiB | host ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["modes"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * 8)
            continue
        lines.append(
            f"| {name} | {row['ratio']:.3f} | {row['act_gib']:.2f} | {row['reserved_gib']:.1f} | {row['swapped_gib']:.2f} "
            f"| {row['exposed_copy_ms']:.1f} | {row['misses']:.1f} | {row['late_loads']:.1f} | {row['pinned_gib']:.2f} "
            f"| {row['host_ms']:.0f} |"
        )
    none = result["modes"]["none"]
    return "\n".join([*lines, "", f"none: {none['ms_median']:.1f} ms (median)"])


def write(output: str, hardware: dict[str, Any], results: list[dict[str, Any]]) -> None:
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    with open(output + ".json", "w") as file:
        json.dump({"schema": 1, **hardware, "results": results}, file, indent=1)
    with open(output + ".md", "w") as file:
        header = "\n".join(f"- {key}: {value}" for key, value in hardware.items())
        tables = "\n\n".join(table(result) for result in results)
        file.write(f"# Frontier\n\n{header}\n\n{tables}\n")
    with open(output + ".svg", "w") as file:
        file.write(frontier_svg(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(SCHEDULES), help="may be given several times")
    parser.add_argument("--mode", action="append", help="only these modes (and none)")
    parser.add_argument("--rounds", type=int, default=None, help="instead of each case's own")
    parser.add_argument("--steps", type=int, default=None, help="instead of each case's own")
    parser.add_argument("--output", default=None, help="path without suffix; .json, .md and .svg are written")
    parser.add_argument("--trace", default=None, help="path prefix for the timelines of one mode per case")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("frontier: needs a CUDA device; there is none here")
    started = time.perf_counter()
    hardware = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hyper_parallel": hp.__version__,
        "command": " ".join(["python -m benchmarks.frontier", *sys.argv[1:]]),
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    results: list[dict[str, Any]] = []
    for name in args.case or SCHEDULES:
        schedule = SCHEDULES[name]
        schedule = dataclasses.replace(
            schedule, rounds=args.rounds or schedule.rounds, steps=args.steps or schedule.steps
        )
        results.append(measure(CASES[name], args.mode, schedule, trace_prefix=args.trace))
        hardware["wall_seconds"] = f"{time.perf_counter() - started:.0f}"
        print(table(results[-1]), f"{hardware['wall_seconds']} s", sep="\n", flush=True)
        if args.output:
            write(args.output, hardware, results)


if __name__ == "__main__":
    main()
