"""Searches beside a search: what workers find is used, and what goes wrong with one costs its answer only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.planner import search_workers
from hyper_parallel.planner.corrections import Corrections
from hyper_parallel.planner.moves import Solution
from hyper_parallel.planner.planning import Planning
from hyper_parallel.planner.profile import Profile
from hyper_parallel.planner.search_workers import SearchWorkers, idle_cores
from hyper_parallel.planner.solve import Solver
from hyper_parallel.planner.step_simulator import StepSimulator

from .small import small_profile

FITS = 125
LONG = 600.0  # a limit that ends a hang


class Scripted(SearchWorkers):
    """Workers whose answers are written down here."""

    def __init__(self, *found: Solution) -> None:
        super().__init__(0)
        self.found = found
        self.known: list[Solution] = []

    def begin(self, profile: Profile, corrections: Corrections, budget: int, **asked: object) -> None:
        known = asked["known"]
        assert isinstance(known, list)
        self.known = known

    def collect(self) -> list[Solution]:
        return list(self.found)


def test_a_worker_finds_what_a_search_of_its_stream_finds() -> None:
    profile, corrections = small_profile(), Corrections()
    with SearchWorkers(1, patience_seconds=LONG) as workers:
        workers.begin(profile, corrections, FITS, effort=0.2)
        (first, *_) = workers.collect()
        workers.begin(profile, Corrections.of_work(2.0), FITS, effort=0.2, known=[first])
        assert workers.collect(), "a second question, about the profile that it has already"
    solver = Solver(StepSimulator(profile, corrections))
    solver.solve(FITS, effort=0.2, stream=1)
    assert first == solver.best_known(FITS).solution
    assert solver.simulate(first).step.peak_bytes <= FITS


def test_a_worker_that_dies_costs_its_answer_only() -> None:
    profile = small_profile()
    with SearchWorkers(1, patience_seconds=LONG) as workers:
        workers.begin(profile, Corrections(), FITS, effort=0.1)
        assert workers.collect()
        (worker,) = workers._workers
        workers.begin(profile, Corrections.of_work(2.0), FITS, effort=100.0)
        os.kill(worker._process.pid, signal.SIGKILL)
        assert workers.collect() == [], "nobody waits for an answer that cannot come"
        alone = Planning(profile).plan(FITS)
        assert Planning(profile, workers).plan(FITS).predicted_step_seconds <= alone.predicted_step_seconds


def test_no_process_is_left_and_none_is_started_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    with SearchWorkers(2) as workers:
        assert workers._workers == []
        workers.begin(small_profile(), Corrections(), FITS, effort=100.0)
        processes = [worker._process for worker in workers._workers]
        assert [process.poll() for process in processes] == [None, None]
    assert all(process.poll() is not None for process in processes)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("no process may be started here")

    monkeypatch.setattr(search_workers.subprocess, "Popen", refuse)
    with SearchWorkers(2) as workers:
        assert not Planning(small_profile(), workers).plan(FITS).does_nothing


def test_what_workers_found_is_the_answer_where_it_is_better_and_no_budget_is_refused_that_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = small_profile()
    good = Solver(StepSimulator(profile)).solve(FITS)

    def refuse(self: Planning, solver: Solver, budget: int, effort: float) -> None:
        raise BudgetTooSmallError("nothing was found")

    monkeypatch.setattr(Planning, "_first", refuse)
    with pytest.raises(BudgetTooSmallError, match="nothing was found"):
        Planning(profile, Scripted()).plan(FITS)
    plan = Planning(profile, Scripted(good.solution)).plan(FITS)
    assert plan.predicted_step_seconds == good.step.step_seconds
    assert plan.predicted_peak_bytes <= FITS


def test_a_step_that_fits_asks_no_worker() -> None:
    workers = SearchWorkers(1)
    assert Planning(small_profile(), workers).plan(10_000).does_nothing
    assert workers._workers == []


def test_a_worker_imports_no_framework() -> None:
    program = "import sys, hyper_parallel.planner.search_worker; print({'torch', 'mindspore'} & sys.modules.keys())"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "set()\n"
    )


def test_cores_are_shared_with_the_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert idle_cores() == 5
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert idle_cores() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert idle_cores() == 0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert idle_cores() == 7
