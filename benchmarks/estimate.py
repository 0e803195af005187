"""Compare estimates with measured steps, and fit the constants of the estimate again. Needs no device.

``python -m benchmarks.estimate`` writes ``benchmarks/results/estimate_202611.md``. The measured numbers, each with its source,
are in ``tests/unit/estimation/data/measured_h200.json``. The constants come from one case: the stack at 8,192 × 2 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from hyper_parallel.estimation import ways
from hyper_parallel.estimation.cards import CARDS, SHARES, Shares
from hyper_parallel.estimation.estimate import ERRORS, cases_of
from hyper_parallel.estimation.shape import ModelShape
from hyper_parallel.estimation.step_model import StepModel

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "tests" / "unit" / "estimation" / "data" / "measured_h200.json"
FRONTIER = ROOT / "benchmarks" / "results" / "frontier_h200_202611.json"
GIB = 2**30
MEMORY_BAR, TIME_BAR = 0.10, 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured way of one case, and its estimate."""

    case: str
    role: str
    kinds: tuple[str, ...]
    way: str
    measured_gib: float | None
    estimated_gib: float
    measured_ms: float
    estimated_ms: float
    measured_ratio: float
    estimated_ratio: float
    source: str
    miss: str

    @property
    def memory_error(self) -> float | None:
        return None if self.measured_gib is None else self.estimated_gib / self.measured_gib - 1

    @property
    def time_error(self) -> float:
        return self.estimated_ms / self.measured_ms - 1

    @property
    def ratio_error(self) -> float:
        return self.estimated_ratio / self.measured_ratio - 1

    @property
    def is_within_bars(self) -> bool:
        return (
            abs(self.memory_error or 0.0) <= MEMORY_BAR and max(abs(self.time_error), abs(self.ratio_error)) <= TIME_BAR
        )


def fit() -> Shares:
    """The shares of the card's data sheet that the stack at 8,192 × 2 tokens reaches, from four of its measured modes.

    Selective checkpointing that saves matmuls and attention replays the element-wise ops: the bandwidth. What it replays more
    when attention alone is saved are the matmuls. What checkpointing replays more than that is attention. What then is missing
    to the plain step is attention's backward.
    """
    (case,) = [one for one in json.loads(FRONTIER.read_text())["results"] if one["case"]["name"] == "stack-8k"]
    seconds = {name: mode["ms_median"] / 1e3 for name, mode in case["modes"].items()}
    plain = seconds["none"]
    elementwise = seconds["torch SAC matmul+attention"] - plain
    matmuls = seconds["torch SAC attention"] - seconds["torch SAC matmul+attention"]
    attention = seconds["torch checkpoint"] - seconds["torch SAC attention"]
    (measured,) = [one for one in json.loads(MEASURED.read_text())["cases"] if one["role"] == "fit"]
    step = step_of(measured)
    card, count = step.card, step.all_tokens * step.shape.layers
    replayed = [op for op in step.ops if op.is_replayed]
    bandwidth = count * sum(op.forward_bytes for op in replayed) / elementwise / card.memory_bytes_per_second
    matmul = count * sum(op.flops for op in replayed) / matmuls / card.flops
    attention_flops = count * sum(op.flops_per_length for op in step.ops) * step.tokens
    known = Shares(
        matmul=matmul,
        attention_forward=attention_flops / attention / card.flops,
        attention_backward=1e9,  # as good as no time at all
        bandwidth=bandwidth,
    )
    left = plain - dataclasses.replace(step, shares=known).device_seconds
    return dataclasses.replace(known, attention_backward=2.5 * attention_flops / left / card.flops)


def step_of(case: dict) -> StepModel:
    return StepModel(shape=ModelShape(**case["shape"]), tokens=case["tokens"], batch=case["batch"], card=CARDS["h200"])


def compared() -> list[Comparison]:
    """Every measured row with its estimate."""
    found = []
    for case in json.loads(MEASURED.read_text())["cases"]:
        step = step_of(case)
        plain = ways.kept(step)
        for row in case["rows"]:
            outcome = estimated(step, row)
            found.append(
                Comparison(
                    case=case["name"],
                    role=case["role"],
                    kinds=cases_of(step),
                    way=row["way"],
                    measured_gib=None if row["way"] == "plan" else row.get("activations_gib"),
                    estimated_gib=outcome.activation_bytes / GIB,
                    measured_ms=row["ratio"] * case["plain_ms"],
                    estimated_ms=outcome.seconds * 1e3,
                    measured_ratio=row["ratio"],
                    estimated_ratio=outcome.seconds / plain.seconds,
                    source=row["source"],
                    miss=row.get("miss", ""),
                )
            )
    return found


def estimated(step: StepModel, row: dict) -> ways.Outcome:
    """The estimate of one row. A plan is asked for the memory that was measured, or for the least that is estimated."""
    if row["way"] != "plan":
        return {"plain": ways.kept, "recompute": ways.recomputed, "inputs": ways.inputs_swapped}[row["way"]](step)
    budget = GIB * row.get("budget_gib", row["activations_gib"])
    outcome = ways.planned(step, max(budget, ways.smallest_plan(step)))
    assert outcome is not None
    return outcome


def show(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def page(rows: list[Comparison], shares: Shares) -> str:
    """The result as Markdown."""
    tested = [row for row in rows if row.role == "test"]
    dense = [row for row in tested if not {"experts", "launch-bound"} & set(row.kinds)]
    within = sum(row.is_within_bars for row in dense)
    lines = [
        "# Estimates against measured steps (H200)",
        "",
        "- command: `python -m benchmarks.estimate`; no device is needed. Measured numbers and their sources:",
        "  `tests/unit/estimation/data/measured_h200.json`; how they were measured is said in the sources",
        "- fitted to the stack at 8,192 × 2 tokens alone (its rows are marked): matmuls reach "
        f"{shares.matmul:.1%} of the card's dense bf16 operations, attention {shares.attention_forward:.1%} forward and "
        f"{shares.attention_backward:.1%} backward, element-wise ops {shares.bandwidth:.1%} of its bandwidth; "
        f"{ways.WORKSPACE_BYTES // 2**20} MiB of workspaces; 0.5 GiB of copies out and 0.75 GiB of loads under way",
        "- read from source code, not fitted: what each op saves and moves. The measured peaks were known when that was written, "
        "and one of them decided a question: the adapters of the LoRA case are taken for bf16 (PEFT's default is float32). What "
        "a layer saves is compared with `hp.print_saved` on the CPU as well: within 4 % "
        "(`tests/integration/integrations/test_estimated_bytes.py`)",
        "- not fitted: 15 µs of host time for an op (assumed), 115 µs for a swapped value (`host_cost_h200_202611.md`)",
        "- bars: activations within 10 %, time within 15 %. A plan is asked for the memory that was measured, so its memory "
        "is not compared",
        f"- dense models that the device limits: {within} of {len(dense)} rows within the bars, "
        f"largest errors: memory {show_largest([row.memory_error for row in dense])}, time "
        f"{show_largest([row.time_error for row in dense])}, ratio {show_largest([row.ratio_error for row in dense])}",
        "",
        "| case | way | activations, GiB: measured | estimated | error | ms: measured | estimated | error "
        "| × plain: measured | estimated | error | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "fitted" if row.role == "fit" else "" if row.is_within_bars else "**missed**"
        gib = "" if row.measured_gib is None else f"{row.measured_gib:.2f}"
        lines.append(
            f"| {row.case} | {row.way} | {gib} | {row.estimated_gib:.2f} | {show(row.memory_error)} | {row.measured_ms:.0f} | "
            f"{row.estimated_ms:.0f} | {show(row.time_error)} | {row.measured_ratio:.3f} | {row.estimated_ratio:.3f} | "
            f"{show(row.ratio_error)} | {verdict} |"
        )
    lines += ["", "## The rows that are missed", ""]
    lines += [f"* {row.case}, {row.way}: {row.miss}" for row in rows if row.miss]
    lines += ["", "## What the command says of its errors", "", "| | memory | seconds | ratio |", "|---|---|---|---|"]
    lines += [f"| {name} | {e.memory:.0%} | {e.seconds:.0%} | {e.ratio:.0%} |" for name, e in ERRORS.items()]
    lines += ["", "No other card was measured: the errors for another card are a guess.", ""]
    return "\n".join(lines)


def show_largest(errors: list[float | None]) -> str:
    return show(max((error for error in errors if error is not None), key=abs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "results" / "estimate_202611.md")
    output = parser.parse_args().output
    shares = fit()
    rows = compared()
    output.write_text(page(rows, SHARES), encoding="utf-8")
    print(f"fitted {shares}\nin use {SHARES}")
    for row in rows:
        if not row.is_within_bars:
            print(f"{row.case}, {row.way}: {show(row.memory_error)} {show(row.time_error)} {show(row.ratio_error)}")


if __name__ == "__main__":
    main()
