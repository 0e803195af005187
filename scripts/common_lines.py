"""Lines that the code of two frameworks has in common, with every identifier and string replaced by a placeholder.

    python scripts/common_lines.py hyper_parallel/backends/torch hyper_parallel/backends/mindspore [--list]

Files of one name are compared, as a diff does. Docstrings, comments, imports and lines of punctuation do not count. Runs of
three or more lines are where logic may be written twice; ``--list`` prints them.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import difflib
import io
import keyword
import pathlib
import sys
import tokenize

SHORTEST_RUN = 3
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of code: where it is, and what is left of it without names."""

    path: pathlib.Path
    number: int
    shape: str


def lines_of(path: pathlib.Path) -> list[Line]:
    """The lines of code in a file."""
    text = path.read_text(encoding="utf-8")
    left_out = {number for node in ast.walk(ast.parse(text)) if _is_left_out(node) for number in _numbers(node)}
    words: dict[int, list[str]] = collections.defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED and token.start[0] not in left_out:
            is_name = token.type == tokenize.NAME and not keyword.iskeyword(token.string)
            words[token.start[0]].append(
                "name" if is_name else "text" if token.type == tokenize.STRING else token.string
            )
    shapes = {number: " ".join(found) for number, found in words.items()}
    return [Line(path, number, shape) for number, shape in shapes.items() if any(map(str.isalnum, shape))]


def _is_left_out(node: ast.AST) -> bool:
    is_string = (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return is_string or isinstance(node, ast.Import | ast.ImportFrom)


def _numbers(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def runs_in_common(first: list[Line], second: list[Line]) -> list[tuple[list[Line], list[Line]]]:
    """The stretches that a diff of two files leaves unchanged."""
    matcher = difflib.SequenceMatcher(
        None, [line.shape for line in first], [line.shape for line in second], autojunk=False
    )
    return [(first[a : a + size], second[b : b + size]) for a, b, size in matcher.get_matching_blocks() if size]


def main(arguments: list[str]) -> int:
    """Count, and print."""
    first, second = (pathlib.Path(name) for name in arguments if not name.startswith("--"))
    names = sorted({path.name for path in first.glob("*.py")} & {path.name for path in second.glob("*.py")})
    runs = [run for name in names for run in runs_in_common(lines_of(first / name), lines_of(second / name))]
    long_runs = [run for run in runs if len(run[0]) >= SHORTEST_RUN]
    total = sum(len(lines_of(path)) for path in second.glob("*.py"))
    print(f"{sum(len(run) for run, _ in runs)} of {total} lines are in both")
    print(f"{sum(len(run) for run, _ in long_runs)} of them are in runs of {SHORTEST_RUN} or more")
    if "--list" in arguments:
        for run, other in long_runs:
            print(
                f"{run[0].path}:{run[0].number}-{run[-1].number} = {other[0].path}:{other[0].number}-{other[-1].number}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
