"""What ``fit_memory`` does now, for a person who waits, and how long it may go on.

Every line goes to the logger ``hyper_parallel.planner`` at level INFO. On a terminal the last one stands on standard error
while the fit runs, and is wiped at its end; ``HYPER_PARALLEL_SUMMARY=0`` keeps it away.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final

from hyper_parallel.config import show_bytes
from hyper_parallel.planner.plan import Plan
from hyper_parallel.records.step_measure import StepMeasure

if TYPE_CHECKING:
    from typing import Self  # not in 3.10

__all__ = ["FitProgress"]

_LOGGER: Final = logging.getLogger("hyper_parallel.planner")
_OFF: Final = ("0", "false", "no", "off")
MOST_SECONDS: Final = 20.0  # where a step takes less than a second
MOST_STEPS: Final = 60  # where it takes longer
MOST_COMPILED: Final = 8  # graphs of each kind of compiled block whose compilation is waited for beside
_SECOND_SEARCH: Final = 0.3  # of what the first one takes: it starts from it


class FitProgress:
    """One fit's clock and its line."""

    def __init__(self, *, is_first_rank: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._is_first_rank = is_first_rank
        self._clock = clock  # that steps are measured by too
        self._start = self._last = clock()
        self._limit = math.inf
        self._longest_search = self._longest_trial = 0.0
        self._plans = 0
        is_off = os.environ.get("HYPER_PARALLEL_SUMMARY", "").strip().lower() in _OFF
        self._on_terminal = is_first_rank and not is_off and sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._start = self._last = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_terminal:
            self._show("")

    def set_step(self, seconds: float | None, *, compile_seconds: float = 0.0) -> None:
        """How long a step takes; None where time is simulated and nothing is limited by it.

        ``compile_seconds``: of one graph of each kind of compiled block; a trial of a plan may need new ones.
        """
        if seconds is not None:
            self._limit = (MOST_SECONDS if seconds < 1 else MOST_STEPS * seconds) + MOST_COMPILED * compile_seconds
        self._last = self._clock()

    def is_time_over(self) -> bool:
        """Whether one more plan would end after the limit."""
        expected = _SECOND_SEARCH * self._longest_search + self._longest_trial
        return self._clock() - self._start + expected > self._limit

    def begin_trial(self) -> None:
        """A plan was found, and is measured now."""
        now = self._clock()
        self._longest_search = max(self._longest_search, now - self._last)
        self._last = now

    def say(self, text: str) -> None:
        """This is done now."""
        if not self._is_first_rank:
            return
        line = f"fit_memory: {self._clock() - self._start:.1f} s: {text}"
        _LOGGER.info("hyper_parallel: %s", line)
        if self._on_terminal:
            self._show(line)

    def say_measured(self, plan: Plan, measured: StepMeasure) -> None:
        """A plan was measured."""
        now = self._clock()
        self._longest_trial = max(self._longest_trial, now - self._last)
        self._last = now
        self._plans += 1
        retries = f", {measured.retries} allocator retries" if measured.retries else ""
        self.say(
            f"plan {self._plans}: predicted {plan.predicted_step_seconds * 1e3:.1f} ms, "
            f"{show_bytes(plan.predicted_peak_bytes)}; measured {measured.step_seconds * 1e3:.1f} ms, "
            f"{show_bytes(measured.peak_bytes)}{retries}"
        )

    @staticmethod
    def _show(line: str) -> None:
        try:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        except (OSError, ValueError):  # a closed stream must not end a fit
            return
