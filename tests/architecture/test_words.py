"""Words that code and docs do not use: riddles, metaphors and subjects that do not exist.

The words are looked for in comments, docstrings, messages and names of ``hyper_parallel/`` and in the pages of ``docs/``. What
to write instead is beside each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {
    "nobody|somebody|anybody|everybody|whoever": "name the code, the thread or the user that is meant",
    "dear|dearer|dearest": "expensive",
    "room|rooms": "memory, space; a package",
    "door|doors": "public API",
    "border|borders": "adapter",
    "house": "package",
    "noted": "recorded, remembered",
    "believe|believed|belief": "use, check",
    "judge|judged|judges": "check, compare",
    "born|birth": "made, created",
    "twin|twins": "the same with another name",
    "settle|relieve|foretell|adopt": "name what is done to what",
    "by itself|by themselves": "automatically, alone",
    "asked for theirs": "say who calls which method",
}
ALLOWED = {
    ("report/assets/report.css", "border"),  # CSS
}
LEFT_OUT = {"log.md"}  # what was written then stays as it was


def files() -> Iterator[tuple[str, Path]]:
    for kind in ("*.py", "*.h", "*.cpp", "*.css", "*.js", "*.html"):
        yield from (
            (str(path.relative_to(ROOT / "hyper_parallel")), path) for path in (ROOT / "hyper_parallel").rglob(kind)
        )
    for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        if path.name not in LEFT_OUT:
            yield path.name, path


def found_in(text: str) -> set[str]:
    """The words of the table in a text. A name is split at its underscores."""
    words = "|".join(INSTEAD)
    return {match.lower() for match in re.findall(rf"(?<![a-z])(?:{words})(?![a-z])", text, re.IGNORECASE)}


def test_the_rule_can_fail() -> None:
    assert found_in("def _make_room():  # Nobody knows. The rooms, by itself") == {
        "room",
        "nobody",
        "rooms",
        "by itself",
    }
    assert found_in("headroom, broom, doorway, Boarders, classroom_") == set()


@pytest.mark.parametrize("name", [name for name, _ in files()])
def test_no_file_uses_them(name: str) -> None:
    path = dict(files())[name]
    found = {word for word in found_in(path.read_text(encoding="utf-8")) if (name, word) not in ALLOWED}
    assert {word: text for words, text in INSTEAD.items() for word in found & set(words.split("|"))} == {}


def test_no_exception_is_without_use() -> None:
    known = dict(files())
    assert [(name, word) for name, word in ALLOWED if word not in found_in(known[name].read_text())] == []
