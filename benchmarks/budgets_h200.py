"""Budgets on models that the library was not tuned for: one line from ``fit_memory`` against torch's checkpoints.

    python -m benchmarks.budgets_h200 [--cases gqa llama3 lora moe liger launch small_card stack8k stack32k] [--output FOLDER]
    python -m benchmarks.budgets_h200 --simulated      # every code path, on a CPU

Each case is a process of its own. First the plain step, torch's checkpoint and torch's selective checkpoint that saves attention
are measured once for their memory. Then ``fit_memory`` is given what torch's checkpoint uses, and 1.5 times as much. Then all
ways take turns: every round applies each way, runs a step that does not count, and times the next ones. A ratio is the median
over rounds of a way's time over the plain step's of the same round, with the smallest and the largest.

Activations are the peak of active bytes minus weights and gradients, in GiB. Retries are the allocator's, of the timed steps.
Profiles, plans and the plans that were measured on the way are written to FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hyper_parallel as hp
from benchmarks import models
from benchmarks.recompute_h200 import CASES, Case, Stack, TorchCheckpoint
from hyper_parallel.backends.torch.planner.meters import Meter, meter_for
from hyper_parallel.testing import simulated_accelerator

_GIB = 2**30
_SMALL_CARD_GIB = 16  # beyond weights and gradients
_SMALL_CARD_BUDGET_GIB = 13


def _frontier_stack(name: str) -> Case:
    case = models.CASES[name]
    device, dtype = torch.device("cuda"), torch.bfloat16
    model, layers = models.build(case, device, dtype)
    x = torch.randn(case.batch, case.tokens, case.width, device=device, dtype=dtype)
    weight = torch.randn_like(x) / x.numel() ** 0.5
    return model, lambda: (model(x) * weight).sum(), layers


def _tiny() -> Case:
    model = Stack(4, 64, 4, 2, 128, 64)
    x = torch.randn(2, 64, 64)
    return model, lambda: model(x).square().sum(), model.layers


_CASES: dict[str, Callable[[], Case]] = {
    **CASES,
    "stack8k": functools.partial(_frontier_stack, "stack-8k"),
    "stack32k": functools.partial(_frontier_stack, "stack-32k"),
    "small_card": CASES["lora"],
    "tiny": _tiny,
}


def _saves_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op)
    is_attention = "scaled_dot_product" in name or "flash_attn" in name
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveCheckpoint(TorchCheckpoint):
    """Torch's own selective checkpoint around a layer, which saves what attention gives."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer; all but attention is recomputed in backward."""
        contexts = functools.partial(create_selective_checkpoint_contexts, _saves_attention)
        return checkpoint(self.layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def wrapped(layers: nn.ModuleList, wrapper: Callable[[nn.Module], nn.Module]) -> Iterator[None]:
    """Other modules in the place of the layers."""
    originals = list(layers)
    for at, layer in enumerate(originals):
        layers[at] = wrapper(layer)
    try:
        yield
    finally:
        for at, layer in enumerate(originals):
            layers[at] = layer


Mode = Callable[[nn.ModuleList], contextlib.AbstractContextManager[Any]]
"""The layers under one way, for as long as the context lasts."""

TORCH_WAYS: dict[str, Mode] = {
    "none": lambda layers: contextlib.nullcontext(),
    "torch checkpoint": lambda layers: wrapped(layers, TorchCheckpoint),
    "torch selective": lambda layers: wrapped(layers, SelectiveCheckpoint),
}


class Bench:
    """One case."""

    file = "budgets.jsonl"

    def __init__(self, name: str, output: Path | None, case: Case | None = None) -> None:
        self.name = name
        self.output = output
        self.modes = dict(TORCH_WAYS)
        self.model, forward, self.layers = case or _CASES[name]()
        self.forward = forward
        self.started = time.perf_counter()
        self.step()
        parameters = list(self.model.parameters())
        self.meter: Meter = meter_for(parameters[0].device, who="budgets_h200")
        self.meter.wait()
        trained = [p.grad for p in parameters if p.grad is not None]
        self.fixed_bytes = sum(p.nbytes for p in parameters) + sum(grad.nbytes for grad in trained)
        self.plans: dict[str, hp.Plan] = {}

    def step(self) -> None:
        """Forward and backward; gradients stay in place."""
        self.forward().backward()

    def emit(self, **fields: Any) -> None:
        """One line of the answer."""
        line = json.dumps(
            {"case": self.name, **fields, "at": round(time.perf_counter() - self.started)},
            default=lambda each: str(each),
        )
        print(line, flush=True)
        if self.output is not None:
            with (self.output / self.file).open("a") as file:
                file.write(line + "\n")

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[None]:
        """The model under one way."""
        planned = name in self.plans
        with hp.apply_plan(self.model, self.plans[name]) if planned else self.modes[name](self.layers):
            yield

    def timed(self, name: str, *, steps: int, warmup: int) -> dict[str, Any]:
        """Seconds of some steps, and their peak."""
        with self.way(name):
            seconds, host = [], []
            retries = self._retries()
            for number in range(warmup + steps):
                self.model.zero_grad(set_to_none=False)
                if number == warmup:
                    gc.collect()
                    self.meter.reset_peak()
                    retries = self._retries()
                self.meter.wait()
                start = time.perf_counter()
                self.step()
                host.append(time.perf_counter() - start)
                self.meter.wait()
                seconds.append(time.perf_counter() - start)
            peak = self.meter.peak_bytes()
            return {
                "ms": 1e3 * statistics.median(seconds[warmup:]),
                "steps_ms": [round(1e3 * each, 1) for each in seconds],  # those that do not count first
                "host_ms": 1e3 * statistics.median(host[warmup:]),
                "act_gib": (peak - self.fixed_bytes) / _GIB,
                "retries": self._retries() - retries,
            }

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats()["num_alloc_retries"]) if torch.cuda.is_available() else 0

    def fit(self, name: str, act_gib: float) -> None:
        """Plan for a budget and remember the plan."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        budget = int(self.fixed_bytes + act_gib * _GIB)
        started = time.perf_counter()
        try:
            applied = hp.fit_memory(self.model, self.step, budget, profile=self.profile, **self.fit_options(budget))
        except hp.HyperParallelError as error:
            self.emit(mode=name, budget_gib=round(act_gib, 3), error=f"{type(error).__name__}: {error}"[:900])
            return
        took = time.perf_counter() - started + self.profile_seconds
        plan = applied.plan
        applied.remove()
        self.plans[name] = plan
        self.emit(
            mode=name,
            budget_gib=round(act_gib, 3),
            plan_s=round(took, 1),
            predicted_ms=round(1e3 * plan.predicted_step_seconds, 1),
            predicted_act_gib=round((plan.predicted_peak_bytes - self.fixed_bytes) / _GIB, 3),
            history=applied.history,
        )
        if self.output is not None:
            plan.save(self.output / f"{self.name}_{name.replace(' ', '_')}.json")

    def fit_options(self, budget: int) -> dict[str, Any]:
        """How else to fit."""
        return {}

    def torch_ways(self) -> list[str]:
        """The ways that need no plan."""
        return [way for way in self.modes if way != "none" or self.name != "small_card"]

    def take_profile(self) -> None:
        """Measure the step once for all budgets; its seconds count in every budget's planning."""
        started = time.perf_counter()
        self.profile = hp.profile_memory(self.model, self.step)
        self.profile_seconds = time.perf_counter() - started
        self.emit(mode="profile", seconds=round(self.profile_seconds, 1))
        if self.output is not None:
            self.profile.save(self.output / f"{self.name}_profile.json")

    def rounds(self, count: int, steps: int) -> None:
        """All ways in turn; one line for each way."""
        ways = [*self.torch_ways(), *self.plans]
        rows: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(count):
            for at in range(len(ways)):
                way = ways[(at + number) % len(ways)]
                with contextlib.suppress(torch.OutOfMemoryError):
                    rows[way].append(self.timed(way, steps=steps, warmup=2))
        base = rows.get("none") or [{"ms": self.plain_ms}] * count
        for way, measured in rows.items():
            if not measured:
                self.emit(mode=way, rounds=0, error="out of memory")
                continue
            ratios = [row["ms"] / plain["ms"] for row, plain in zip(measured, base)]
            plan = self.plans.get(way)
            extra = {} if plan is None else self._missed(plan, measured)
            self.emit(
                mode=way,
                rounds=len(ratios),
                ms=round(statistics.median(row["ms"] for row in measured), 2),
                host_ms=round(statistics.median(row["host_ms"] for row in measured), 2),
                x=round(statistics.median(ratios), 4),
                x_range=[round(min(ratios), 4), round(max(ratios), 4)],
                steps_ms=[row["steps_ms"] for row in measured],
                act_gib=round(max(row["act_gib"] for row in measured), 3),
                retries=sum(row["retries"] for row in measured),
                **extra,
            )

    def _missed(self, plan: hp.Plan, measured: list[dict[str, Any]]) -> dict[str, float]:
        ms = statistics.median(row["ms"] for row in measured)
        peak = max(row["act_gib"] for row in measured) * _GIB + self.fixed_bytes
        return {
            "time_over_predicted": round(ms / (1e3 * plan.predicted_step_seconds), 4),
            "peak_over_predicted": round(peak / plan.predicted_peak_bytes, 4),
            "peak_over_budget": round(peak / plan.budget_bytes, 4),
        }

    def run(self, *, rounds: int, steps: int) -> None:
        """Everything, in the order that leaves most when time is up."""
        plain = self.timed("none", steps=steps, warmup=2)
        self.plain_ms = plain["ms"]
        self.emit(mode="none, once", **plain)
        if self.name == "small_card":
            gc.collect()
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((self.fixed_bytes + _SMALL_CARD_GIB * _GIB) / total)
        torch_one = self.timed("torch checkpoint", steps=steps, warmup=2)
        self.emit(mode="torch checkpoint, once", **torch_one)
        self.take_profile()
        if self.name == "small_card":
            self.fit("fit", _SMALL_CARD_BUDGET_GIB)
        else:
            self.fit("fit 1.0", torch_one["act_gib"])
            self.fit("fit 1.5", 1.5 * torch_one["act_gib"])
        self.rounds(rounds, steps)


def main() -> None:
    """Measure the cases, one process each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(_CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    cases = options.cases or ["gqa", "llama3", "lora", "moe", "liger", "launch", "small_card", "stack8k", "stack32k"]
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
    if options.simulated:
        with simulated_accelerator():
            Bench("tiny", options.output).run(rounds=2, steps=1)
    elif len(cases) == 1:
        torch.manual_seed(0)
        Bench(cases[0], options.output).run(rounds=options.rounds, steps=options.steps)
    else:
        for case in cases:
            command = [sys.executable, "-m", "benchmarks.budgets_h200", "--cases", case]
            command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
            command += [] if options.output is None else ["--output", str(options.output)]
            subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
