"""Lines that the code of two frameworks has in common, with every identifier and string replaced by a placeholder.

    python scripts/common_lines.py hyper_parallel/backends/torch hyper_parallel/backends/mindspore [--list]

Docstrings, comments, imports and lines of punctuation do not count. A line of the second package counts as common where the
same line is in the first; a run is three or more of them in a row in one file, which is where logic may be written twice.
``--list`` prints the runs.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
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


def runs_in_common(mine: list[Line], theirs: list[Line]) -> list[tuple[list[Line], list[Line]]]:
    """The longest runs of lines that both files have, none of them counted twice."""
    found, at = [], 0
    places = collections.defaultdict(list)
    for place, line in enumerate(theirs):
        places[line.shape].append(place)
    while at < len(mine):
        best, start = 0, 0
        for place in places[mine[at].shape]:
            length = 0
            while (
                at + length < len(mine)
                and place + length < len(theirs)
                and mine[at + length].shape == theirs[place + length].shape
            ):
                length += 1
            if length > best:
                best, start = length, place
        if best >= SHORTEST_RUN:
            found.append((mine[at : at + best], theirs[start : start + best]))
        at += max(best, 1) if best >= SHORTEST_RUN else 1
    return found


def main(arguments: list[str]) -> int:
    """Count, and print."""
    folders = [pathlib.Path(name) for name in arguments if not name.startswith("--")]
    first, second = ({path: lines_of(path) for path in sorted(folder.rglob("*.py"))} for folder in folders)
    known = {line.shape for lines in first.values() for line in lines}
    mine = [line for lines in second.values() for line in lines]
    runs = []
    for lines in second.values():
        candidates = [runs_in_common(lines, theirs) for theirs in first.values()]
        best = max(candidates, key=lambda found: sum(len(run) for run, _ in found), default=[])
        runs += best
    print(f"{sum(line.shape in known for line in mine)} of {len(mine)} lines are in both")
    print(
        f"{sum(len(run) for run, _ in runs)} of {len(mine)} are in runs of {SHORTEST_RUN} or more, in {len(runs)} runs"
    )
    if "--list" in arguments:
        for run, other in runs:
            print(
                f"{run[0].path}:{run[0].number}-{run[-1].number} = {other[0].path}:{other[0].number}-{other[-1].number}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
