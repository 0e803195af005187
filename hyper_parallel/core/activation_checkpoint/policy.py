"""Policies as values: what a user may give, turned into one kind of question, and every answer into a :class:`Fate`.

``CheckpointPolicy`` and ``ActivationPolicy`` are the public answers. Here they end: the packer and the regions know only
the fates save, swap and recompute.

An op policy is asked once for each op instance, in forward. A :class:`PolicyTable` (a list of names, a plan, rules) does not
look at arguments: its answers are remembered per op, and a recorded region can use it without calling Python for every op.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.errors import PolicyError
from hyper_parallel.fates import Fate

__all__ = [
    "ActivationPolicy",
    "ByOpName",
    "OpPolicy",
    "PolicyContext",
    "PolicyTable",
    "TensorPolicy",
    "as_op_policy",
    "fate_of_op",
    "fate_of_tensor",
    "op_label",
    "op_names",
]

OpPolicy = Callable[..., Any]  # (ctx, op, *args, **kwargs) -> CheckpointPolicy | bool
TensorPolicy = Callable[[Any], Any]  # (tensor) -> CheckpointPolicy | ActivationPolicy | None
Op = Any  # torch._ops.OpOverload | an object with .name on MindSpore
Answers = CheckpointPolicy | Mapping[int, CheckpointPolicy] | Callable[[], CheckpointPolicy]  # see PolicyTable

_KNOWN = ", ".join(f"CheckpointPolicy.{policy.name}" for policy in CheckpointPolicy)


class ActivationPolicy(enum.Enum):
    """What a tensor policy may answer, beside :class:`CheckpointPolicy` and None."""

    SAVE = 0
    SWAP = 1


_OP_FATES: Final[Mapping[CheckpointPolicy, Fate]] = {
    CheckpointPolicy.MUST_SAVE: Fate.SAVE,
    CheckpointPolicy.PREFER_SAVE: Fate.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Fate.RECOMPUTE,
    CheckpointPolicy.MUST_SWAP: Fate.SWAP,
}
_TENSOR_FATES: Final[Mapping[enum.Enum, Fate]] = {
    CheckpointPolicy.MUST_SAVE: Fate.SAVE,
    CheckpointPolicy.PREFER_SAVE: Fate.SAVE,
    CheckpointPolicy.MUST_SWAP: Fate.SWAP,
    ActivationPolicy.SAVE: Fate.SAVE,
    ActivationPolicy.SWAP: Fate.SWAP,
}


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


class PolicyTable(abc.ABC):
    """A policy that does not look at arguments: what it answers for an op is found once, and remembered."""

    @abc.abstractmethod
    def answers_for(self, op: Op) -> Answers:
        """One answer for every instance of the op; or one for each, by how often it came; or a function that is asked."""


@dataclasses.dataclass(frozen=True)
class ByOpName(PolicyTable):
    """A policy by op names: a value that can be compared, printed and pickled."""

    table: Mapping[str, CheckpointPolicy]
    otherwise: CheckpointPolicy = CheckpointPolicy.PREFER_RECOMPUTE

    def answers_for(self, op: Op) -> CheckpointPolicy:
        """The first of the op's names that the table knows decides."""
        for name in op_names(op):
            if name in self.table:
                return self.table[name]
        return self.otherwise

    def __call__(self, ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """The same, asked as a function."""
        return self.answers_for(op)

    def __hash__(self) -> int:
        return hash((frozenset(self.table.items()), self.otherwise))


def _accept_names(names: list[str], where: str) -> None:
    """Accepts every name: for frameworks that cannot list their ops."""


def as_op_policy(
    given: Any, *, where: str, check_names: Callable[[list[str], str], None] = _accept_names
) -> OpPolicy | PolicyTable:
    """A callable, or a list of ops and op names to save, as one policy; anything else is an error.

    ``check_names(names, where)`` refuses names of a list that no op has.
    """
    if isinstance(given, str | bytes) or given is None:
        raise PolicyError(
            f"{where}: a policy is a function (ctx, op, *args, **kwargs) or a list of ops or op names, got {given!r}"
        )
    if isinstance(given, PolicyTable):
        return given
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        given = list(given)
        check_names([item for item in given if isinstance(item, str)], where)
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


def fate_of_op(answer: Any, op: Op, *, where: str) -> Fate:
    """What an op policy's answer means; a bool means save or prefer to recompute."""
    if answer.__class__ is CheckpointPolicy:
        return _OP_FATES[answer]
    if answer is True:
        return Fate.SAVE
    if answer is False:
        return Fate.RECOMPUTE
    hint = (
        "; torch's own CheckpointPolicy is another enum with other meanings"
        if type(answer).__name__ == "CheckpointPolicy"
        else ""
    )
    raise PolicyError(
        f"{where}: the policy answered {answer!r} for op {op_label(op)}; known answers are {_KNOWN}, True and False{hint}"
    )


def fate_of_tensor(answer: Any, tensor: Any, *, where: str) -> Fate:
    """What a tensor policy's answer means; None means swap."""
    if answer is None:
        return Fate.SWAP
    fate = _TENSOR_FATES.get(answer) if isinstance(answer, enum.Enum) else None
    if fate is None:
        raise PolicyError(
            f"{where}: the tensor policy answered {answer!r} for a tensor {tuple(tensor.shape)} {tensor.dtype}; known "
            "answers are CheckpointPolicy.MUST_SAVE, PREFER_SAVE, MUST_SWAP, ActivationPolicy.SAVE, SWAP, and None (swap)"
        )
    return fate
