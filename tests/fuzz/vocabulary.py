"""Every operation that a program may name, wherever it is written."""

from __future__ import annotations

from typing import Any

from fuzz import operations, rare
from fuzz.operations import Spec

__all__ = ["FUNCTIONS", "SPECS", "Spec"]

SPECS: dict[str, Spec] = {**operations.SPECS}
for _family in rare.FAMILIES.values():
    SPECS.update(_family)

FUNCTIONS: dict[str, Any] = {name: getattr(operations, name, None) or getattr(rare, name) for name in SPECS}
