"""Mutants: one function of the engine with one line changed, for as long as a test needs it.

A mutant is made from the function's own source. If the line it changes is no longer there exactly once, that is an error:
a mutant must not outlive what it mutates.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import textwrap
from typing import Any

import pytest

__all__ = ["Edit", "Mutant"]


@dataclasses.dataclass(frozen=True)
class Edit:
    """``target`` is ``module:qualified.name`` below ``hyper_parallel``; ``old`` becomes ``new``."""

    target: str
    old: str
    new: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module_name, path = self.target.split(":")
        module = importlib.import_module(f"hyper_parallel.{module_name}")
        *owners, name = path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.target} has {self.old!r} {source.count(self.old)} times, not once"
        scope: dict[str, Any] = {}
        exec(
            compile("from __future__ import annotations\n" + source.replace(self.old, self.new), path, "exec"),
            vars(module),
            scope,
        )
        monkeypatch.setattr(owner, name, scope[name])


@dataclasses.dataclass(frozen=True)
class Mutant:
    """What was taken away, where, which probe notices it, and how that shows."""

    name: str
    edits: tuple[Edit, ...]
    probe: str
    shows: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for edit in self.edits:
            edit.apply(monkeypatch)

    def __repr__(self) -> str:
        return self.name
