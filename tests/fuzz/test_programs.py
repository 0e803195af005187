"""The fuzzer's slice of every check: a fixed set of programs, and hypothesis over the same space."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies

from fuzz.generate import HypothesisChoices, generate, program_number
from fuzz.oracle import judge
from fuzz.program import Program
from fuzz.source import program_to_script

_CHUNKS = {"first": 6, "wide": 12, "state": 4, "effects": 3, "calls": 2, "second": 2, "unseen": 2}
_PROGRAMS_PER_CHUNK = 60
_EXAMPLES = 250


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(os.environ, "HYPER_PARALLEL_PLATFORM", "torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(program: Program, title: str) -> None:
    """Fail with a script that a person can run."""
    verdict = judge(program)
    if not verdict.is_good:
        raise AssertionError(f"{verdict.detail}\n\n{program_to_script(program, f'{title} {verdict.detail}')}")


@pytest.mark.parametrize(
    ("territory", "chunk"), [(territory, chunk) for territory, chunks in _CHUNKS.items() for chunk in range(chunks)]
)
def test_programs_with_and_without_us_give_the_same_bytes(territory: str, chunk: int) -> None:
    for number in range(chunk * _PROGRAMS_PER_CHUNK, (chunk + 1) * _PROGRAMS_PER_CHUNK):
        check(program_number(2026, number, territory), f"Program {number} of seed 2026 in {territory!r}.")


@strategies.composite
def programs(draw: Any) -> Program:
    return generate(HypothesisChoices(draw))


@hypothesis.settings(
    max_examples=_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(programs())
def test_drawn_programs_with_and_without_us_give_the_same_bytes(program: Program) -> None:
    check(program, "Found by hypothesis.")
