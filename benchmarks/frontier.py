"""Time against memory, every mode in turn, one process, ratios to "none" of the same run.

    python -m benchmarks.frontier --case stack-8k --output benchmarks/results/frontier_h200_202611

**act** is the peak of active bytes minus weights and gradients. Modes are interleaved: every round runs each of them, and
medians over all rounds are compared. Loss and gradient norm must agree with "none".
"""

from __future__ import annotations

import argparse
import contextlib
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
from hyper_parallel.core.activation_checkpoint.timing import Span
from hyper_parallel.report.trace import write_chrome_trace

GIB = 2**30


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
    """One mode: warm-up steps, then timed ones; the peak is read over the timed steps only."""
    with mode(model, layers):
        for _ in range(warmup):
            loss = step()
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

    with mode(model, layers):
        step()
        handles = [layer.register_forward_hook(lambda *_: mark("forward")) for layer in layers]
        for layer in layers:
            hook = lambda _, __, output: output.register_hook(lambda _: mark("backward"))  # noqa: E731
            handles.append(layer.register_forward_hook(hook))
        with hp.SwapManager().record_timeline() as spans:
            base = torch.cuda.Event(enable_timing=True)
            base.record()
            marks.append(("forward", base))
            step()
            mark("backward")
        for handle in handles:
            handle.remove()
    moments = [(name, base.elapsed_time(event) * 1e3) for name, event in marks]
    compute = [
        Span(track="compute", start_us=before[1], end_us=after[1], nbytes=0)
        for before, after in itertools.pairwise(moments)
    ]
    write_chrome_trace(path, [*spans, *compute])


def measure(
    case: Case, names: list[str] | None, *, rounds: int, warmup: int, steps: int, trace_prefix: str | None = None
) -> dict[str, Any]:
    device, dtype = torch.device("cuda"), torch.bfloat16
    model, layers = build(case, device, dtype)
    step = make_step(case, model, device, dtype)
    step()
    results: dict[str, list[dict[str, Any]]] = {}
    modes = modes_for(case)
    chosen = [name for name in modes if names is None or name in names or name == "none"]
    for round_index in range(rounds):
        for name in chosen:
            try:
                row = run_mode(model, layers, step, modes[name], warmup=warmup if round_index == 0 else 1, steps=steps)
            except Exception as error:  # a peer that fails is a result too
                row = {"error": f"{type(error).__name__}: {error}"[:300]}
                gc.collect()
                torch.cuda.empty_cache()
            results.setdefault(name, []).append(row)
            print(f"{case.name} round {round_index} {name}: {_brief(row)}", flush=True)
    summary = {name: _summary(rows, results["none"]) for name, rows in results.items()}
    if trace_prefix is not None:
        for name in (name for name in chosen if name.startswith("ours")):
            path = f"{trace_prefix}_{case.name}_{name.replace(' ', '-')}.json"
            record_timeline(model, layers, step, modes[name], path)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be given several times")
    parser.add_argument("--mode", action="append", help="only these modes (and none)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", default=None, help="path without suffix; .json, .md and .svg are written")
    parser.add_argument("--trace", default=None, help="path prefix for one timeline per mode of ours in the 8k case")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("frontier: needs a CUDA device; there is none here")
    hardware = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hyper_parallel": hp.__version__,
        "command": " ".join(sys.argv),
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    }
    results = [
        measure(
            CASES[name],
            args.mode,
            rounds=args.rounds,
            warmup=args.warmup,
            steps=args.steps,
            trace_prefix=args.trace if name == "stack-8k" else None,
        )
        for name in (args.case or ["stack-8k", "stack-32k"])
    ]
    text = "\n\n".join(table(result) for result in results)
    print(text)
    if args.output:
        os.makedirs(os.path.dirname(args.output) or ".", exist_ok=True)
        with open(args.output + ".json", "w") as file:
            json.dump({"schema": 1, **hardware, "results": results}, file, indent=1)
        with open(args.output + ".md", "w") as file:
            header = "\n".join(f"- {key}: {value}" for key, value in hardware.items())
            file.write(f"# Frontier\n\n{header}\n\n{text}\n")
        with open(args.output + ".svg", "w") as file:
            file.write(frontier_svg(results))


if __name__ == "__main__":
    main()
