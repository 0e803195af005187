"""The names that MindSpore's ops have where a policy is asked about them, and the refusal of names that none has.

MindSpore keeps no list. A name is known if a primitive is exported under it or registered by a class of that name, or if an op of
that name has run under one of our modes in this process. So an op of the user's own library is known once it has run.
"""

from __future__ import annotations

import difflib
import functools

from hyper_parallel.errors import PolicyError

__all__ = ["check_op_names", "remember_op"]

_RAN: set[str] = set()


def remember_op(name: str) -> None:
    """An op of this name ran."""
    _RAN.add(name)


@functools.cache
def _exported() -> frozenset[str]:
    from mindspore.ops import operations
    from mindspore.ops.auto_generate import gen_ops_prim
    from mindspore.ops.operations import _grad_ops, _inner_ops

    modules = (operations, gen_ops_prim, _grad_ops, _inner_ops)
    return frozenset(name for module in modules for name in vars(module) if name[:1].isupper())


def check_op_names(names: list[str], where: str) -> None:
    """Refuse names that match no op.

    Raises:
        PolicyError: no op of that name is known.
    """
    for name in names:
        if name in _exported() or name in _RAN:
            continue
        close = difflib.get_close_matches(name, [*_RAN, *_exported()], n=4, cutoff=0.55)
        near = f"Near misses: {', '.join(close)}. " if close else ""
        raise PolicyError(
            f"{where}: the list of ops to save names {name!r}, and there is no op of that name. {near}hp.list_ops(model, step) "
            "lists the ops of a step."
        )
