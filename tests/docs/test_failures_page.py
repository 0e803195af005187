"""The failure catalogue: its numbers are complete, each row names tests that exist, and tests cite rows that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .blocks import ROOT

PAGE = (ROOT / "docs" / "failures.md").read_text()
ROWS = {
    match.group(1): re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", match.group(0))
    for match in re.finditer(r"^\| ([BP]\d+) \|.*$", PAGE, re.MULTILINE)
}
NUMBERS = [*(f"B{number}" for number in range(1, 49)), *(f"P{number}" for number in range(1, 11))]


def names_in(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_number_has_one_row() -> None:
    assert list(ROWS) == NUMBERS
    assert len(re.findall(r"^\| [BP]\d+ \|", PAGE, re.MULTILINE)) == len(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_tests_that_a_row_names_exist(number: str) -> None:
    assert ROWS[number], f"{number} names no test"
    for file, name in ROWS[number]:
        assert name in names_in(ROOT / file), f"{number}: {file} has no {name}"


def test_a_test_that_carries_a_number_is_named_in_that_row() -> None:
    found = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in sorted(names_in(path)):
            for number in re.findall(r"(?<=_)b(\d+)(?=_)", name):
                found += 1
                assert name in {named for _, named in ROWS[f"B{int(number)}"]}, (
                    f"{path}: {name} is not in row B{number}"
                )
    assert found > 50
