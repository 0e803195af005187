"""The simulator against what hand-written policies measured on an H200 (benchmarks/results/frontier_h200_202611.md).

The profile is arithmetic, see ``stack_profile``; nothing was fitted to the rows below but the three times named there.
"""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.profile import EngineSettings
from hyper_parallel.planner.step_simulator import SimulatedStep, StepSimulator

from .small import short_choice
from .stack_profile import GIB, NAMES, stack_profile


def recipe(
    swap: tuple[str, ...] = (), save: tuple[str, ...] = (), *, is_split: bool = False, inputs: str = "w"
) -> Choice:
    fates = "".join("w" if name in swap else "s" if name in save else "r" for name in NAMES)
    return short_choice(int(is_split), inputs * (1 + is_split), fates)


def settings(window: float, prefetch: float, tail: float = 0.0) -> EngineSettings:
    return EngineSettings(
        window_bytes=int(window * GIB), prefetch_bytes=int(prefetch * GIB), tail_bytes=int(tail * GIB)
    )


WIDE = recipe(("qkv", "attention", "o"), ("gate", "up"))
SPLIT = recipe(("qkv", "attention"), is_split=True)
SPLIT_SAVE = recipe(("qkv", "attention"), ("gate", "up"), is_split=True)
GATE = recipe(("qkv", "attention", "gate"), is_split=True)
GATE_SAVE = recipe(("qkv", "attention", "gate"), ("up",), is_split=True)
ALL_MATMULS = ("qkv", "attention", "o", "gate", "up", "down")
IDLE = settings(1, 1)


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured mode: the median of its runs."""

    case: str
    name: str
    choices: list[Choice]
    settings: EngineSettings
    act_gib: float
    ratio: float


def late(count: int, saved: int, early: Choice, last: Choice) -> list[Choice]:
    return [early] * (count - saved) + [last] * saved


ROWS = [
    Row("8k", "none", [LEFT_ALONE] * 16, IDLE, 38.52, 1.0),
    Row("8k", "torch checkpoint", [recipe(inputs="s")] * 16, IDLE, 5.21, 1.254),
    Row("8k", "save attention", [recipe(save=("attention",), inputs="s")] * 16, IDLE, 7.11, 1.207),
    Row("8k", "save matmuls", [recipe(save=ALL_MATMULS, inputs="s")] * 16, IDLE, 26.69, 1.017),
    Row("8k", "ours 15.3", [WIDE] * 16, settings(2.0, 0.75, 0.75), 15.41, 1.0235),
    Row("8k", "ours 9.2", late(16, 8, SPLIT, SPLIT_SAVE), settings(1.75, 0.75, 0.6), 9.04, 1.0905),
    Row("8k", "ours 5.2", late(16, 3, SPLIT, SPLIT_SAVE), settings(1.0, 0.75, 0.6), 5.05, 1.1255),
    Row("8k", "ours 4.0", late(16, 1, SPLIT, SPLIT_SAVE), settings(1.0, 0.75, 0.6), 3.71, 1.145),
    Row("8k", "ours inputs", [recipe()] * 16, settings(0.5, 0.25), 3.83, 1.2555),
    Row("32k", "none", [LEFT_ALONE] * 12, IDLE, 58.21, 1.0),
    Row("32k", "torch checkpoint", [recipe(inputs="s")] * 12, IDLE, 9.35, 1.255),
    Row("32k", "save attention", [recipe(save=("attention",), inputs="s")] * 12, IDLE, 12.14, 1.139),
    Row("32k", "save matmuls", [recipe(save=ALL_MATMULS, inputs="s")] * 12, IDLE, 40.92, 1.013),
    Row("32k", "ours 25.2", [*[WIDE] * 11, LEFT_ALONE], settings(2.0, 1.5), 23.39, 1.014),
    Row("32k", "ours 15.1", late(12, 10, GATE, GATE_SAVE), settings(2.0, 1.5, 1.2), 13.57, 1.036),
    Row("32k", "ours 7.8", [GATE] * 12, settings(2.0, 1.5, 1.2), 7.52, 1.068),
    Row("32k", "ours inputs", [recipe()] * 12, settings(0.5, 0.25), 7.10, 1.255),
]


def played(row: Row) -> tuple[SimulatedStep, float, float]:
    profile = stack_profile(row.case)
    simulator = StepSimulator(profile)
    line = simulator.simulate(row.choices, row.settings)
    none = simulator.simulate([LEFT_ALONE] * len(row.choices), row.settings)
    act = (line.peak_bytes - profile.base.weights - profile.base.gradients) / GIB
    return line, act, line.step_seconds / none.step_seconds


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.case} {row.name}")
def test_peak_within_two_percent_and_time_within_two(row: Row) -> None:
    _, act, ratio = played(row)
    assert act == pytest.approx(row.act_gib, rel=0.02)
    assert ratio == pytest.approx(row.ratio, rel=0.02)


def test_one_row_peaks_lower_than_the_simulator_says() -> None:
    # 32k, three late layers saved: measured 8.20 GiB. The simulator never lets a finished copy go before the window is full,
    # the engine does when the host happens to see it; the prediction is on the safe side.
    row = Row("32k", "ours 9.4", late(12, 3, GATE, GATE_SAVE), settings(2.0, 1.5, 1.2), 8.20, 1.060)
    _, act, ratio = played(row)
    assert row.act_gib < act < row.act_gib * 1.08
    assert ratio == pytest.approx(row.ratio, rel=0.02)
