"""No test depends on how fast this machine is: a limit in a test ends a hang, so it is long."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).resolve().parents[1]
SHORTEST_S = 600
WAITS = {"run", "wait", "join", "communicate", "Barrier", "check_output", "check_call"}
ALLOWED = {
    ("fuzz/test_crew.py", 0.1): "it looks again and again; the loop around it has the limit",
    ("fuzz/harness.py", 120): "it comes before the limit of the crew; a program takes milliseconds",
}
NOT_IN_MAKE_TEST = ("gpu",)


def short_limits(text: str) -> Iterator[tuple[int, float]]:
    """The line and the seconds of every ``timeout=`` of a call that waits, where it is a short number."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for keyword in node.keywords:
            value = keyword.value
            is_limit = name in WAITS and keyword.arg == "timeout" and isinstance(value, ast.Constant)
            if is_limit and isinstance(value.value, int | float) and value.value < SHORTEST_S:
                yield node.lineno, value.value


def test_the_rule_can_fail() -> None:
    text = (
        "import subprocess\nsubprocess.run(['true'], timeout=60)\nthread.join(timeout=600)\nBarrier(2, timeout=5.0)\n"
    )
    assert list(short_limits(text)) == [(2, 60), (4, 5.0)]


def test_a_limit_ends_a_hang_and_nothing_else() -> None:
    found = set()
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        if not name.startswith(NOT_IN_MAKE_TEST):
            found |= {(name, limit) for _, limit in short_limits(path.read_text())}
    assert found == set(ALLOWED)
