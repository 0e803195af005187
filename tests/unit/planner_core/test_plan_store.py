"""The store of plans on several ranks: the first reads and writes, the others get its plan."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.plan import Plan
from hyper_parallel.planner.plan_store import PlanStore, fit_with_store
from hyper_parallel.planner.step_identity import StepIdentity
from hyper_parallel.records.step_measure import StepMeasure

from .small import small_profile

BUDGET = 10_000
MEASURED = StepMeasure(
    peak_bytes=1000,
    step_seconds=1.0,
    reserved_bytes=1000,
    swapped_out_bytes=0,
    exposed_copy_seconds=0.0,
    late_loads=0,
    misses=0,
)


def identity(base_bytes: int = 100, *facts: str) -> StepIdentity:
    return StepIdentity(facts=("device: a card", *facts), base_bytes=base_bytes)


class _Ranks:
    """Two ranks, of which this is one; the other one's rows are given, and what was gathered is kept."""

    def __init__(self, rank: int, *others: Any) -> None:
        self.rank = rank
        self._others = list(others)
        self.gathered: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        other = self._others.pop(0)
        return [value, other] if self.rank == 0 else [other, value]


class _Backend:
    """A backend that applies nothing and identifies every step alike."""

    def __init__(self, ranks: _Ranks | None, here: StepIdentity | None) -> None:
        self._ranks = ranks
        self._here = here

    def world(self) -> _Ranks | None:
        return self._ranks

    def identify_step(self, model: Any, step: Any, *, blocks: Any) -> StepIdentity | None:
        return self._here

    def apply_plan(self, model: Any, plan: Plan) -> Any:
        return types.SimpleNamespace(plan=plan, measured=None, stored_at=None)


def ask(folder: Path, ranks: _Ranks | None, here: StepIdentity | None = None) -> Any:
    """One fit; its plan is searched for where the store has none."""
    plan = hp.plan_memory(small_profile(), BUDGET, effort=0.1)
    backend: Any = _Backend(ranks, here)
    return fit_with_store(
        PlanStore(folder),
        backend,
        None,
        lambda: None,
        blocks=None,
        budget_bytes=BUDGET,
        question=("budget: 10000",),
        search=lambda: types.SimpleNamespace(plan=plan, measured=MEASURED, stored_at=None),
    )


def full(one: StepIdentity) -> StepIdentity:
    """An identity as a rank sends it."""
    return StepIdentity(facts=(*one.facts, "budget: 10000"), base_bytes=one.base_bytes)


def test_the_first_rank_writes_and_reads_and_the_other_gets_its_plan(tmp_path: Path) -> None:
    here, there = identity(100, "inputs: 4"), identity(120, "inputs: 8")
    first = ask(tmp_path, _Ranks(0, (full(there), None), None), here)
    assert first.stored_at is None
    (file,) = tmp_path.iterdir()
    ranks = _Ranks(0, (full(there), None), None)
    again = ask(tmp_path, ranks, here)
    assert again.stored_at == str(file)
    assert again.measured == MEASURED
    stored = ranks.gathered[1]
    assert stored.fitted.base_bytes == 120  # of the fullest device
    elsewhere = tmp_path / "another machine"
    other = ask(elsewhere, _Ranks(1, (full(here), None), stored), there)
    assert other.plan == stored
    assert not elsewhere.exists()


def test_a_rank_with_other_inputs_is_another_fit(tmp_path: Path) -> None:
    here = identity(100, "inputs: 4")
    ask(tmp_path, _Ranks(0, (full(identity(100, "inputs: 8")), None), None), here)
    again = ask(tmp_path, _Ranks(0, (full(identity(100, "inputs: 9")), None), None), here)
    assert again.stored_at is None
    assert len(list(tmp_path.iterdir())) == 2


def test_a_rank_that_fails_stops_the_others_and_one_that_does_not_fit_searches(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"rank 1 failed, so this one stops too: ValueError"):
        ask(tmp_path, _Ranks(0, (None, "ValueError('x')")), identity())
    assert ask(tmp_path, _Ranks(0, (None, None)), identity()).stored_at is None
    assert not list(tmp_path.iterdir())


def test_facts_that_all_ranks_share_are_written_once() -> None:
    one = StepIdentity.of_ranks([identity(1, "a: 1"), identity(2, "a: 2")])
    assert one.facts == ("ranks: 2", "every rank: device: a card", "rank 0: a: 1", "rank 1: a: 2")
    assert one.base_bytes == 2


def test_one_process_uses_its_own_plan(tmp_path: Path) -> None:
    assert ask(tmp_path, None, identity()).stored_at is None
    assert ask(tmp_path, None, identity()).stored_at is not None
    assert ask(tmp_path, None, identity(100 + BUDGET // 50)).stored_at is None  # more is on the device now
