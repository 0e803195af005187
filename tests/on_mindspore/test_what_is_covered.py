"""Every case that torch's suite holds is held here too, or the documentation says why MindSpore cannot express it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hyper_parallel.platform.mindspore import activation_checkpoint

from .scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]


def torch_scenarios() -> set[str]:
    """The names in torch's table, read from the source: this process has no business importing its models."""
    names = set()
    for file in (ROOT / "tests" / "integration" / "activation").glob("scenarios*.py"):
        for node in ast.parse(file.read_text()).body:
            marks = [mark.id for mark in getattr(node, "decorator_list", ()) if isinstance(mark, ast.Name)]
            if isinstance(node, ast.FunctionDef) and "scenario" in marks:
                names.add(node.name)
    return names


def test_cases_are_held_or_listed_with_a_reason() -> None:
    cases = torch_scenarios()
    assert len(cases) > 60
    page = (ROOT / "docs" / "mindspore.md").read_text()
    listed = set(re.findall(r"^\| `([a-z_0-9]+)`[^|]*\|[^|]+\|", page, re.MULTILINE))
    missing = cases - set(SCENARIOS)
    assert sorted(missing - listed) == []
    assert sorted(listed & set(SCENARIOS)) == [], "listed as missing, and here"
    assert sorted(set(SCENARIOS) - cases) == []


def test_the_room_has_the_names_that_are_promised() -> None:
    promised = {"swap_wrapper", "SwapWrapper", "ActivationWrapper", "AsyncSaveOnCpu", "base_check_fn", "FuncCell"}
    assert promised <= set(activation_checkpoint.__all__)
    for name in activation_checkpoint.__all__:
        assert hasattr(activation_checkpoint, name)
