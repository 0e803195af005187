"""The code blocks of a page: found, told apart, and checked without being run.

A block that cannot run here says so in its first line, where readers see it: ``# needs two GPUs``. Of such a block everything
that can be known without running it is checked: syntax, imports, names, attributes of modules, keywords of calls.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL)
_MISSING = object()


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int  # of its first line of code
    info: str  # what stands after the fence: python title="train.py"
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def language(self) -> str:
        """The first word of its info."""
        return self.info.partition(" ")[0]

    @property
    def needs(self) -> str:
        """What it cannot be run without; empty: nothing."""
        match = re.match(r"# needs (.+)", self.text)
        return match.group(1) if match else ""

    def compiled(self) -> Any:
        """Its code, whose tracebacks name the line of the page."""
        return compile("\n" * (self.line - 1) + self.text, self.page, "exec")


def blocks_of(page: str, text: str) -> list[Block]:
    """Every fenced block of a page, in order; those inside notes are dedented."""
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        info, body = match.group("info").strip(), textwrap.dedent(match.group("body"))
        found.append(Block(page, line, info, body))
    return found


def complaints(block: Block, namespace: Mapping[str, Any], unrun: dict[str, Any]) -> list[str]:
    """What is wrong with a block that is not run.

    ``namespace`` is what the page has defined so far, ``unrun`` what its blocks that were not run would have; this block's names
    are added there.
    """
    tree = ast.parse(block.text)
    imported: dict[str, Any] = {}
    found = list(_imported(tree, imported, block.needs))
    known: dict[str, Any] = {**vars(builtins), **namespace, **unrun, **imported}
    unrun.update(imported)
    for node in ast.walk(tree):  # whatever the block itself defines is known, wherever it does so
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known[node.id] = unrun[node.id] = _MISSING
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known[node.name] = unrun[node.name] = _MISSING
        elif isinstance(node, ast.arg):
            known[node.arg] = _MISSING
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in known:
            found.append(f"{node.id} is defined nowhere on the page")
        elif isinstance(node, ast.Attribute):
            owner = _value(node.value, known)
            if inspect.ismodule(owner) and _attribute(owner, node.attr) is _MISSING:
                found.append(f"{owner.__name__} has no {node.attr}")
        elif isinstance(node, ast.Call):
            found += _unknown_keywords(node, _value(node.func, known))
    return [f"{block.where}: {complaint}" for complaint in found]


def _imported(tree: ast.AST, known: dict[str, Any], needs: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            home = node.module if isinstance(node, ast.ImportFrom) else alias.name
            assert home is not None, "pages use no relative imports"
            name = alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else home.partition(".")[0])
            known[name] = _MISSING
            try:
                module = importlib.import_module(home)
            except ModuleNotFoundError:
                if home.partition(".")[0] not in needs:
                    yield f"there is no module {home}"
                continue
            if isinstance(node, ast.ImportFrom):
                known[name] = _attribute(module, alias.name)
                if known[name] is _MISSING:
                    yield f"{home} has no {alias.name}"
            else:
                known[name] = module if alias.asname else importlib.import_module(home.partition(".")[0])


def _attribute(owner: Any, name: str) -> Any:
    value = getattr(owner, name, _MISSING)
    if value is _MISSING and inspect.ismodule(owner):
        try:
            return importlib.import_module(f"{owner.__name__}.{name}")
        except ModuleNotFoundError:
            return _MISSING
    return value


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, _MISSING)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        return _MISSING if owner is _MISSING else _attribute(owner, node.attr)
    return _MISSING


def _unknown_keywords(call: ast.Call, function: Any) -> Iterator[str]:
    if function is _MISSING or not callable(function):
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # made in C
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"{getattr(function, '__qualname__', function)} takes no {keyword.arg}="
