"""Factors of a profile's seconds, fitted to every plan that was measured.

Theory
------
A measured step is ``simulate(plan, factors)`` and an error of about ``NOISE``. The factors are those of ``Corrections``: what the
device computes, what the host takes to issue blocks, for regions and for swapped values, copies, and waits for copies. What is
known of them before anything was measured is a prior: 1, with a spread for each. The most likely factors are those with the
least

    sum over measured plans   rho(log(simulated / measured) / NOISE)
  + sum over factors          (log(factor) / SPREAD)²

where ``rho`` grows only linearly for large errors, so that one odd measurement does not bend all factors. A factor that no
measured plan depends on stays at 1. Simulated time is piecewise linear in the factors, so differences stand for derivatives,
and a few damped Gauss-Newton steps are enough. Everything is plain arithmetic on six unknowns: the same on any machine.

The step left alone, which was measured for the profile, sets where the prior is: its ratio scales everything alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from hyper_parallel.planner.corrections import FACTORS, Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.step_simulator import StepSimulator

__all__ = ["Calibration"]

NOISE: Final = 0.01
SPREAD: Final = {
    "work_scale": 0.05,  # measured op by op, and as a whole
    "issue_scale": 0.2,
    "region_scale": 0.4,  # measured with regions that keep nothing
    "swap_scale": 0.6,  # measured with eight small values
    "link_scale": 0.3,
    "stall_cost": 0.4,
}
_BOUND: Final = 3.0  # spreads: no factor is further away
_LINEAR: Final = 3.0  # noises: beyond, an error counts linearly
_STEP: Final = 0.1  # of log(factor), for differences
_ROUNDS: Final = 4
_TRIES: Final = 3  # of one round, each with more damping
_ENOUGH: Final = 1e-2  # a round that improves the sum by less ends it
_DISTANCES: Final = (-1.5, 1.0, 2.0)  # spreads: where one factor starts from
_STARTS: Final = 2  # the best starts are descended from


class _Point(NamedTuple):
    cost: float
    logs: list[float]
    errors: list[float]


class _Row(NamedTuple):
    solution: Solution
    seconds: float


class Calibration:
    """The measured plans of one fit, and the factors that explain them."""

    def __init__(self, simulator: StepSimulator, prior: Corrections) -> None:
        self._simulator = simulator
        self._prior = prior
        self._rows: list[_Row] = []
        self._logs = [0.0] * len(FACTORS)  # of the factors, beside the prior's

    def add(self, solution: Solution, seconds: float) -> None:
        """A plan that was measured. The same plan again replaces what was known of it."""
        self._rows = [row for row in self._rows if row.solution != solution]
        self._rows.append(_Row(solution, seconds))
        if len(self._rows) > 1 or self._rows[0].seconds > 0:
            self._fit()

    @property
    def corrections(self) -> Corrections:
        """The prior with the fitted factors; its bytes are the prior's."""
        return self._corrected(self._logs)

    def ratios(self) -> list[float]:
        """What was measured over what is simulated with these factors, for each plan."""
        return [math.exp(-error) for error in self._errors(self._logs)]

    def _corrected(self, logs: Sequence[float]) -> Corrections:
        factors = {name: getattr(self._prior, name) * math.exp(log) for name, log in zip(FACTORS, logs)}
        return dataclasses.replace(self._prior, **factors)

    def _errors(self, logs: Sequence[float]) -> list[float]:
        simulator = self._simulator.corrected(self._corrected(logs))
        return [
            math.log(simulator.simulate(*row.solution).step_seconds / row.seconds)  # (choices, settings)
            for row in self._rows
        ]

    @staticmethod
    def _cost(errors: Sequence[float], logs: Sequence[float]) -> float:
        total = sum((log / SPREAD[name]) ** 2 for name, log in zip(FACTORS, logs))
        for error in errors:
            size = abs(error) / NOISE
            total += size**2 if size <= _LINEAR else _LINEAR * (2 * size - _LINEAR)
        return total

    def _fit(self) -> None:
        """From several starts: a factor that nothing waits for has no slope, and matters once it is large enough."""
        starts = [self._logs]
        for at, name in enumerate(FACTORS):
            for distance in _DISTANCES:
                starts.append([SPREAD[name] * distance if other == at else log for other, log in enumerate(self._logs)])
        points = sorted((self._point(logs) for logs in starts), key=lambda point: point.cost)
        self._logs = min((self._descend(point) for point in points[:_STARTS]), key=lambda point: point.cost).logs

    def _point(self, logs: list[float]) -> _Point:
        errors = self._errors(logs)
        return _Point(self._cost(errors, logs), logs, errors)

    def _descend(self, point: _Point) -> _Point:
        damping = 1e-3
        for _ in range(_ROUNDS):
            slopes = self._slopes(point.errors, point.logs)
            before = point.cost
            for _ in range(_TRIES):
                step = _newton_step(point.errors, slopes, point.logs, damping)
                logs = [
                    max(-_BOUND * SPREAD[name], min(_BOUND * SPREAD[name], log + change))
                    for name, log, change in zip(FACTORS, point.logs, step)
                ]
                tried = self._point(logs)
                if tried.cost < point.cost:
                    point, damping = tried, damping / 4
                    break
                damping = max(damping, 0.1) * 8
            if before - point.cost <= _ENOUGH * max(1.0, before):
                break
        return point

    def _slopes(self, errors: Sequence[float], logs: Sequence[float]) -> list[list[float]]:
        """By plan and factor: how the error changes with the factor's logarithm."""
        columns = []
        for at in range(len(logs)):
            moved = [log + _STEP if other == at else log for other, log in enumerate(logs)]
            columns.append([(after - before) / _STEP for after, before in zip(self._errors(moved), errors)])
        return [list(row) for row in zip(*columns)]


def _newton_step(
    errors: Sequence[float], slopes: Sequence[Sequence[float]], logs: Sequence[float], damping: float
) -> list[float]:
    """The change of each factor's logarithm that lowers the sum most, if errors were linear in it."""
    count = len(logs)
    spreads = [SPREAD[name] for name in FACTORS]
    matrix = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for error, row in zip(errors, slopes):
        size = abs(error) / NOISE
        weight = (1.0 if size <= _LINEAR else _LINEAR / size) / NOISE**2
        for i in range(count):
            right[i] -= weight * row[i] * error
            for j in range(count):
                matrix[i][j] += weight * row[i] * row[j]
    for i in range(count):
        right[i] -= logs[i] / spreads[i] ** 2
        matrix[i][i] = (matrix[i][i] + 1 / spreads[i] ** 2) * (1 + damping)
    return _solved(matrix, right)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a symmetric positive definite system, by elimination; the prior makes it one."""
    count = len(right)
    rows = [[*matrix[at], right[at]] for at in range(count)]
    for at in range(count):
        pivot = rows[at][at]
        for below in range(at + 1, count):
            share = rows[below][at] / pivot
            for column in range(at, count + 1):
                rows[below][column] -= share * rows[at][column]
    found = [0.0] * count
    for at in reversed(range(count)):
        known = sum(rows[at][column] * found[column] for column in range(at + 1, count))
        found[at] = (rows[at][count] - known) / rows[at][at]
    return found
