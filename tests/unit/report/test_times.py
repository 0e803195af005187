"""Times of a run: the same in table and chart, with their spread, and none where the spreads overlap."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.records.run_record import PROCESS_PART, StepRecord
from hyper_parallel.report.page import render_page
from hyper_parallel.report.words import show_peak_change, show_time, show_time_change
from tests.unit.report.runs import small_run


def step(name: str, *seconds: float) -> StepRecord:
    return dataclasses.replace(small_run().steps[0], name=name).timed(seconds)


def test_a_figure_is_the_median_with_half_the_range() -> None:
    assert show_time(step("a", 0.010, 0.014, 0.011)) == "11.0 ±2.0 ms"
    assert show_time(step("a", 2.0, 2.5, 2.1)) == "2.10 ±0.25 s"
    assert show_time(step("a", 0.010)) == "10.0 ms"


def test_a_difference_within_the_spread_is_shown_as_none() -> None:
    none = step("none", 0.010, 0.012, 0.011)
    assert show_time_change(step("auto", 0.0119, 0.013, 0.014), none) == "same"
    assert show_time_change(step("auto", 0.022, 0.023, 0.021), none) == "+100%"
    assert step("auto", 0.005, 0.006, 0.0055).time_change(none) == pytest.approx(-0.5)


def test_a_peak_that_did_not_change_is_shown_as_the_same() -> None:
    none = step("none", 0.01)
    assert show_peak_change(none, none) == "same"
    assert show_peak_change(dataclasses.replace(none, peak_bytes=none.peak_bytes // 2), none).startswith("-")


def test_the_chart_ends_when_the_median_step_ends() -> None:
    timed = step("none", 0.3, 0.1, 0.2)
    last = max(*timed.memory.times_us, *(span.end_us for span in timed.spans))
    assert last == pytest.approx(timed.step_seconds * 1e6)
    assert timed.step_seconds == 0.2


def test_peak_curve_and_budget_are_the_same_bytes_without_the_process() -> None:
    whole = step("none", 0.1)
    whole = dataclasses.replace(whole, peak_parts={PROCESS_PART: 100, "weights": 7})
    own = whole.without_process()
    assert own.peak_bytes == whole.peak_bytes - 100
    assert max(own.memory.nbytes) == max(0, max(whole.memory.nbytes) - 100)
    assert own.process_bytes == 0
    run = dataclasses.replace(small_run(), steps=(own,), budget_bytes=50)
    assert run.budget_line_bytes == run.budget_bytes


def test_page_and_terminal_write_times_alike() -> None:
    run = dataclasses.replace(small_run(), steps=(step("none", 0.1, 0.2), step("auto", 0.15, 0.3)))
    page = render_page(run)
    for one in run.steps:
        assert show_time(one) in page
    assert ">same<" in page
