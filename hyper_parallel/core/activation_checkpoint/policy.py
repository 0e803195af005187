"""Op policies as values: what a user may give, turned into one kind of question and one kind of answer.

A policy is asked once for each op instance, in forward. A list is a value too, and its answers are remembered per op, so
that the cheap form costs one dictionary look-up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.errors import PolicyError

__all__ = ["ByOpName", "OpPolicy", "PolicyContext", "as_op_policy", "op_label", "op_names"]

OpPolicy = Callable[..., Any]  # (ctx, op, *args, **kwargs) -> CheckpointPolicy | bool
Op = Any  # torch._ops.OpOverload | an object with .name on MindSpore

_KNOWN = ", ".join(f"CheckpointPolicy.{policy.name}" for policy in CheckpointPolicy)


@dataclasses.dataclass(frozen=True)
class PolicyContext:
    """The first argument of a policy."""

    is_recompute: bool = False


def op_label(op: Op) -> str:
    """The op as a person names it: ``aten.mm.default``, ``MatMul``."""
    name = getattr(op, "name", None)
    return name if isinstance(name, str) else str(op)


def op_names(op: Op) -> tuple[str, ...]:
    """Every name an op answers to: ``aten.mm.default``, ``aten.mm`` and ``mm``."""
    label = op_label(op)
    parts = label.split(".")
    if len(parts) == 3:
        return label, f"{parts[0]}.{parts[1]}", parts[1]
    if len(parts) == 2:
        return label, parts[1]
    return (label,)


@dataclasses.dataclass(frozen=True)
class ByOpName:
    """A policy that is a table: equal to its twin, printable, picklable."""

    table: Mapping[str, CheckpointPolicy]
    otherwise: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE

    def __call__(self, ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The first of the op's names that the table knows decides."""
        for name in op_names(op):
            if name in self.table:
                return self.table[name]
        return self.otherwise

    def __hash__(self) -> int:
        return hash((frozenset(self.table.items()), self.otherwise))


def as_op_policy(given: Any, *, where: str) -> OpPolicy:
    """A callable, or a list of ops and op names to save, as one policy; anything else is an error."""
    if isinstance(given, str | bytes) or given is None:
        raise PolicyError(
            f"{where}: a policy is a function (ctx, op, *args, **kwargs) or a list of ops or op names, got {given!r}"
        )
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        return ByOpName({_listed_name(item, where): CheckpointPolicy.MUST_SAVE for item in given})
    if callable(given):
        return given  # type: ignore[no-any-return]
    raise PolicyError(
        f"{where}: a policy is a function (ctx, op, *args, **kwargs) or a list of ops or op names, got {given!r}"
    )


def _listed_name(item: Any, where: str) -> str:
    if isinstance(item, str):
        return item
    is_op = (
        hasattr(item, "_schema")
        or hasattr(item, "overloads")
        or hasattr(item, "py_kernels")  # torch's higher-order ops
        or isinstance(getattr(item, "name", None), str)
    )
    if not is_op:
        raise PolicyError(
            f"{where}: the list of ops to save holds {item!r}; give ops (torch.ops.aten.mm.default) or names ('mm', 'aten.mm')"
        )
    return op_label(item)


def checked_answer(answer: Any, op: Op, *, where: str) -> CheckpointPolicy:
    """The policy's answer as our enum; a bool means save or prefer to recompute."""
    if answer.__class__ is CheckpointPolicy:
        return answer
    if answer is True:
        return CheckpointPolicy.MUST_SAVE
    if answer is False:
        return CheckpointPolicy.PREFER_RECOMPUTE
    hint = (
        "; torch's own CheckpointPolicy is another enum with other meanings"
        if type(answer).__name__ == "CheckpointPolicy"
        else ""
    )
    raise PolicyError(
        f"{where}: the policy answered {answer!r} for op {op_label(op)}; known answers are {_KNOWN}, True and False{hint}"
    )
