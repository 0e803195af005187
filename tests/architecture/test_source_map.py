"""The glossary and the map of the source in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import hyper_parallel

PACKAGE = Path(hyper_parallel.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NOT_SOURCE = {"__pycache__", ".mypy_cache", ".ruff_cache"}
MOST_WORDS = 25


def rows_of(heading: str) -> list[tuple[str, str]]:
    """The first two cells of every table row below a heading of level 2, without the head of each table."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    cells = [
        tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.split("\n") if line[:1] == "|"
    ]
    heads = [at - 1 for at, row in enumerate(cells) if set(row[0]) == {"-"}]
    return [(row[0], row[1]) for at, row in enumerate(cells) if at not in heads and at - 1 not in heads]


def mapped_files() -> list[str]:
    return [name.strip("`") for name, _ in rows_of("Map of the source")]


def source_files() -> list[str]:
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file())
    return sorted(
        str(path) for path in files if not NOT_SOURCE & set(path.parts) and path.suffix not in (".pyc", ".so")
    )


def test_every_file_is_in_the_map_exactly_once_and_nothing_else_is() -> None:
    mapped, files = Counter(mapped_files()), source_files()
    assert [name for name, count in mapped.items() if count > 1] == [], "named twice"
    assert sorted(set(files) - set(mapped)) == [], "missing in docs/architecture.md"
    assert sorted(set(mapped) - set(files)) == [], "in docs/architecture.md, and not there"


def test_every_line_of_the_map_says_what_is_in_the_file() -> None:
    for name, words in rows_of("Map of the source"):
        assert re.fullmatch(r"`[\w./]+`", name), name
        assert words.endswith("."), f"{name}: {words!r} is not a sentence"


def test_the_glossary_is_short_and_names_each_word_once() -> None:
    words = [name for name, _ in rows_of("Glossary")]
    assert 20 <= len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)
    assert all(meaning for _, meaning in rows_of("Glossary"))


def names_defined_in(path: Path) -> set[str]:
    """Functions, classes, methods as ``Class.method``, and assigned names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_where_to_change_what_names_files_and_functions_that_exist() -> None:
    rows = rows_of("Where to change what")
    assert len(rows) >= 10
    for what, text in rows:
        places = re.findall(r"`([\w/]+\.py)`(?:: ((?:`[\w.]+`(?:, )?)+))?", text)
        assert places, what
        for path, names in places:
            missing = set(re.findall(r"`([\w.]+)`", names)) - names_defined_in(PACKAGE / path)
            assert not missing, f"{what}: {path} does not define {missing}"
