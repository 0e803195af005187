"""Budgets against what a planned step really takes, one process, ratios to "none" of the same run.

    python -m benchmarks.plan_h200 --output benchmarks/results/plan_h200_202611
    python -m benchmarks.plan_h200 --simulated --output /tmp/plan      # every code path, on a CPU, in a minute

For every budget: ``fit_memory`` from the same profile, then steps of "none" and of the plan in turn. **act** is the peak of
active bytes minus weights and gradients. Results are written after every budget, so that a run that is cut short leaves
what it has.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import hyper_parallel as hp
from benchmarks.frontier import grad_norm
from benchmarks.frontier_modes import modes_for
from benchmarks.models import CASES, Case, build, make_step
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.testing import simulated_accelerator

GIB = 2**30
BUDGETS_GIB = {
    "stack-8k": (4.0, 5.2, 9.2, 15.3),
    "stack-32k": (7.8, 9.4, 15.1, 25.2),
    "llama-8k": (8.4,),
    "llama-32k": (15.8,),
    "moe-4k": (3.3,),
}
HAND_MODES = {
    "stack-8k": ("ours 4.0", "ours 5.2", "ours 9.2", "ours 15.3"),
    "stack-32k": ("ours 7.8", "ours 9.4", "ours 15.1", "ours 25.2"),
    "stack-tiny": ("ours 4.0", "ours 15.3"),
}
TINY_SHARES = (0.45, 0.6, 0.8)  # of the activations of "none", for the simulated run


class Timer:
    """Steps of the model as it is, measured by the device's own clock."""

    def __init__(self, meter: Meter, step: Any, fixed_bytes: int) -> None:
        self.meter = meter
        self.step = step
        self.fixed_bytes = fixed_bytes

    def run(self, steps: int, warmup: int = 1) -> dict[str, Any]:
        """Times in seconds and the peak over the timed steps only."""
        for _ in range(warmup):
            self.step()
        gc.collect()
        self.meter.wait()
        self.meter.reset_peak()
        before = hp.stats()
        marks = []
        for _ in range(steps):
            start = self.meter.mark()
            self.step()
            marks.append((start, self.meter.mark()))
        self.meter.wait()
        peak, after = self.meter.peak_bytes(), hp.stats()
        return {
            "seconds": [self.meter.seconds(start, end) for start, end in marks],
            "peak_bytes": peak,
            "act_gib": (peak - self.fixed_bytes) / GIB,
            "reserved_gib": self.meter.reserved_bytes() / GIB,
            "swapped_gib": (after.swapped_out_bytes - before.swapped_out_bytes) / steps / GIB,
            "exposed_ms": (after.exposed_copy_us - before.exposed_copy_us) / 1e3 / steps,
            "late_loads": after.late_loads - before.late_loads,
            "misses": after.misses - before.misses,
        }


class Bench:
    """One case: a profile, then every budget."""

    def __init__(
        self, case: Case, device: torch.device, dtype: torch.dtype, args: argparse.Namespace, results: Any
    ) -> None:
        self.case = case
        self.args = args
        self.results = results
        self.model, self.layers = build(case, device, dtype)
        self.step = make_step(case, self.model, device, dtype)
        self.step()
        self.meter = meter_for(device, who="plan_h200")
        self.fixed_bytes = sum(p.nbytes + p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.timer = Timer(self.meter, self.step, self.fixed_bytes)

    def run(self) -> None:
        row = self.results.case(self.case, self.fixed_bytes)
        row["none"] = [self.timer.run(self.args.steps, warmup=2)]
        row["grad_norm"] = self._grad_norm()
        self.results.flush()
        started = time.perf_counter()
        profile = hp.profile_memory(self.model, self.step, steps=self.args.steps)
        row["profile_seconds"] = time.perf_counter() - started
        row["profile"] = summary_of(profile)
        profile.save(f"{self.args.output}_{self.case.name}_profile.json")
        self.results.flush()
        budgets = self._budgets(row["none"][0]["peak_bytes"])
        started = time.perf_counter()
        plans = first_plans(profile, budgets)
        row["first_plans_seconds"] = time.perf_counter() - started
        print("first plans", row["first_plans_seconds"], "profile", row["profile_seconds"], flush=True)
        for budget, plan in zip(budgets, plans):
            name = f"{(budget - self.fixed_bytes) / GIB:.4g} GiB"
            self._guarded(row["budgets"], name, functools.partial(self._budget, budget, profile, plan))
        self._guarded(row["budgets"], "fits", lambda: self._fits(profile, row["none"][0]["peak_bytes"]))
        for name in HAND_MODES.get(self.case.name, ()) if self.args.hand else ():
            if self.results.seconds() < self.args.limit_s:
                self._guarded(row["hand"], name, functools.partial(self._hand, name))

    def _budgets(self, none_peak: int) -> list[int]:
        if self.case.name in BUDGETS_GIB:
            return [self.fixed_bytes + int(gib * GIB) for gib in self.args.act or BUDGETS_GIB[self.case.name]]
        return [self.fixed_bytes + int(share * (none_peak - self.fixed_bytes)) for share in TINY_SHARES]

    def _guarded(self, rows: list[Any], name: str, work: Any) -> None:
        """A budget that fails is a result too."""
        try:
            row = work()
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        rows.append({"name": name, **row})
        print(
            name,
            json.dumps({k: v for k, v in rows[-1].items() if k not in ("history", "plan")}, default=str),
            flush=True,
        )
        self.results.flush()

    def _budget(self, budget: int, profile: Any, first: Any) -> dict[str, Any]:
        if isinstance(first, Exception):
            raise first
        started = time.perf_counter()
        applied = hp.fit_memory(
            self.model,
            self.step,
            budget,
            profile=profile,
            plan=first,
            steps=self.args.steps,
            attempts=self.args.attempts,
        )
        fit_seconds = time.perf_counter() - started
        plan = applied.plan
        plan.save(f"{self.args.output}_{self.case.name}_{(budget - self.fixed_bytes) / GIB:.1f}_plan.json")
        with applied:
            planned = [self.timer.run(self.args.steps)]
            norm = self._grad_norm()
        none = self.timer.run(self.args.steps)
        with hp.apply_plan(self.model, plan, device_bytes=applied.device_bytes):
            planned.append(self.timer.run(self.args.steps))
        return {
            "budget_bytes": budget,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_seconds": plan.predicted_step_seconds,
            "predicted": dataclasses.asdict(plan.predicted),
            "measured": planned,
            "none": none,
            "grad_norm": norm,
            "fit_seconds": fit_seconds,
            "attempts": len(applied.history),
            "history": list(applied.history),
            "settings": dataclasses.asdict(plan.settings),
            "device_bytes": applied.device_bytes,
            "plan": plan.summary().splitlines(),
        }

    def _fits(self, profile: Any, none_peak: int) -> dict[str, Any]:
        """A budget that the step keeps by itself: nothing may be applied, and nothing may move."""
        applied = hp.fit_memory(self.model, self.step, int(none_peak * 1.2), profile=profile, steps=self.args.steps)
        with applied:
            planned = self.timer.run(self.args.steps)
        none = self.timer.run(self.args.steps)
        return {
            "budget_bytes": int(none_peak * 1.2),
            "does_nothing": applied.plan.does_nothing,
            "predicted_peak_bytes": applied.plan.predicted_peak_bytes,
            "predicted_seconds": applied.plan.predicted_step_seconds,
            "measured": [planned],
            "none": none,
            "attempts": len(applied.history),
        }

    def _hand(self, name: str) -> dict[str, Any]:
        with modes_for(self.case)[name](self.model, self.layers):
            measured = self.timer.run(self.args.steps, warmup=2)
        return {"measured": [measured], "none": self.timer.run(self.args.steps)}

    def _grad_norm(self) -> float:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        self.step()
        self.meter.wait()
        return grad_norm(self.model)


def summary_of(profile: Any) -> dict[str, Any]:
    return {
        "measured": dataclasses.asdict(profile.measured),
        "link": dataclasses.asdict(profile.link),
        "base": dataclasses.asdict(profile.base),
        "prologue": dataclasses.asdict(profile.prologue),
        "epilogue": dataclasses.asdict(profile.epilogue),
        "host": dataclasses.asdict(profile.host),
        "kinds": [{"name": kind.name, "ops": len(kind.ops), "cuts": len(kind.cuts)} for kind in profile.kinds],
        "blocks": len(profile.blocks),
    }


def first_plans(profile: Any, budgets: list[int]) -> list[Any]:
    """The first plan of every budget, or what making it raised; made side by side, because the device waits meanwhile."""
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(hp.plan_memory, profile, budget) for budget in budgets]
        return [one.exception() or one.result() for one in waiting]


class Results:
    """What was measured so far, on disk after every row."""

    def __init__(self, output: str, device: str) -> None:
        self._started = time.perf_counter()
        self._output = output
        self.data: dict[str, Any] = {
            "device": device,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "hyper_parallel": hp.__version__,
            "command": " ".join(sys.argv),
            "cases": [],
        }

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def case(self, case: Case, fixed_bytes: int) -> dict[str, Any]:
        row = {"case": dataclasses.asdict(case), "fixed_bytes": fixed_bytes, "budgets": [], "hand": []}
        self.data["cases"].append(row)
        return row

    def flush(self) -> None:
        self.data["wall_seconds"] = self.seconds()
        Path(f"{self._output}.json").write_text(json.dumps(self.data, indent=1, default=str))
        Path(f"{self._output}.md").write_text(self.table())

    def table(self) -> str:
        lines = [
            "# From a budget to a plan",
            "",
            f"- device: {self.data['device']}, torch {self.data['torch']}, Python {self.data['python']}, "
            f"hyper_parallel {self.data['hyper_parallel']}",
            f"- command: `{self.data['command']}`",
            '- act: peak of active bytes minus weights and gradients, GiB; ratios to "none" between two runs of the plan',
            "",
        ]
        for case in self.data["cases"]:
            lines += [f"## {case['case']['name']}", ""]
            lines += [
                "| budget (act) | predicted act | measured act | peak off | predicted ms | measured ms | time off | × none "
                "| attempts | under |"
            ]
            lines += ["|---|---|---|---|---|---|---|---|---|---|"]
            lines += [_line(row, case["fixed_bytes"]) for row in case["budgets"]]
            if case["hand"]:
                lines += ["", "| by hand | act | × none |", "|---|---|---|"]
                lines += [_hand_line(row) for row in case["hand"]]
            lines += [""]
        return "\n".join(lines)


def _median(rows: list[dict[str, Any]]) -> float:
    return statistics.median(value for row in rows for value in row["seconds"])


def _line(row: dict[str, Any], fixed: int) -> str:
    if "error" in row:
        return f"| {row['name']} | {row['error'][:200]} | | | | | | | | |"
    peak, seconds, none = (
        max(one["peak_bytes"] for one in row["measured"]),
        _median(row["measured"]),
        _median([row["none"]]),
    )
    predicted_peak, predicted = row["predicted_peak_bytes"], row["predicted_seconds"]
    act = [f"{(value - fixed) / GIB:.3f}" for value in (row["budget_bytes"], predicted_peak, peak)]
    cells = [
        *act,
        f"{peak / predicted_peak - 1:+.2%}",
        f"{predicted * 1e3:.1f}",
        f"{seconds * 1e3:.1f}",
        f"{seconds / predicted - 1:+.2%}",
        f"{seconds / none:.4f}",
        str(row["attempts"]),
        "yes" if peak <= row["budget_bytes"] else "**no**",
    ]
    return f"| {' | '.join(cells)} |"


def _hand_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | {row['error'][:200]} | |"
    act = max(one["act_gib"] for one in row["measured"])
    return f"| {row['name']} | {act:.3f} | {_median(row['measured']) / _median([row['none']]):.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument(
        "--act", action="append", type=float, help="GiB of activations instead of the case's own budgets"
    )
    parser.add_argument("--output", default="benchmarks/results/plan_h200_202611")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--attempts", type=int, default=3)
    parser.add_argument("--no-hand", dest="hand", action="store_false")
    parser.add_argument("--limit-s", type=float, default=330.0, help="no hand-written mode is started after this")
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    device, dtype = (torch.device("cpu"), torch.float32) if args.simulated else (torch.device("cuda"), torch.bfloat16)
    names = args.case or (["stack-tiny"] if args.simulated else ["stack-8k", "stack-32k"])
    with simulated_accelerator() if args.simulated else contextlib.nullcontext():
        results = Results(args.output, "simulated" if args.simulated else torch.cuda.get_device_name())
        for name in names:
            bench = Bench(CASES[name], device, dtype, args, results)
            bench.run()
            del bench
            gc.collect()
            hp.SwapManager().reset()
            if not args.simulated:
                torch.cuda.empty_cache()
        results.flush()
    print(results.table(), flush=True)


if __name__ == "__main__":
    main()
