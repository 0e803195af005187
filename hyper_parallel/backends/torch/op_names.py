"""How rules, plans and profiles name torch's ops."""

from __future__ import annotations

from typing import Any

__all__ = ["op_name", "op_overload"]


def op_name(op: Any) -> str:  # torch._ops.OpOverload | torch._ops.HigherOrderOperator
    """The exact base name of an op: ``mm`` for ``aten.mm.default``."""
    packet = getattr(op, "overloadpacket", None)
    return str(packet.__name__) if packet is not None else str(op)


def op_overload(op: Any) -> str:  # torch._ops.OpOverload | torch._ops.HigherOrderOperator
    """``default`` for ``aten.mm.default``; empty for what has no overloads."""
    return str(getattr(op, "_overloadname", ""))
