"""What an op is, as far as keeping its output goes. Decided once per op and remembered.

Never kept, always replayed, whatever a policy says:

* in-place ops: their output is their input, which the replay makes again;
* views: free to make again, and a fresh tensor in place of a view would be wrong;
* factories: the replay fills what they make;
* ``c10d`` collectives: their schema does not show that they write an argument, so a kept result is silently wrong.

Always kept, never replayed: functional collectives, in which other ranks take part. Their output is filled later, until
``wait_tensor`` returns; that op only waits, so it is replayed like a view.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from hyper_parallel.platform.torch import compat

__all__ = ["KNOWN", "OpFacts", "facts_of", "is_weight_cast", "move_versions", "wait_for"]


_SILENT_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)  # share their input's storage; their schema does not say so

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"})
_TAGGED = frozenset({"aten", "prim", "prims", *_COLLECTIVES})  # random ops carry a tag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpFacts:
    """One op, seen from a selective region."""

    op: Any = None  # torch._ops.OpOverload; held, so that its id names nothing else
    run: Any = None  # the same op without the Python call around it, where there is one
    is_ignored: bool = False  # asks about a tensor, makes nothing
    replay_reason: str | None = None
    is_random: bool = False
    may_draw: bool = False  # random, or written outside torch: such an op does not say whether it draws
    writes: tuple[int | str, ...] = ()  # the arguments it changes, by position or keyword
    writes_anything: bool = False  # its schema does not say which
    writes_lists: bool = False  # see move_versions
    may_be_weight_cast: bool = False  # see is_weight_cast
    can_run_again: bool = True  # False: other ranks take part in it, and do not run it again
    runs_once: bool = False  # its output is kept whatever a policy says
    is_wait: bool = False  # waits for an output that is filled later


KNOWN: dict[int, OpFacts] = {}
"""Facts by the op's id: an op's own hash is a Python call, three times for every op of a region."""


def facts_of(op: Any) -> OpFacts:  # op: torch._ops.OpOverload | torch._ops.HigherOrderOperator
    """The facts of an op."""
    facts = KNOWN.get(id(op))
    if facts is None:
        facts = _examined(op)
        may_draw = facts.is_random or (not facts.is_ignored and getattr(op, "namespace", None) not in _TAGGED)
        can_run_again = getattr(op, "namespace", None) not in _COLLECTIVES
        facts = KNOWN[id(op)] = dataclasses.replace(
            facts,
            op=op,
            run=compat.bare_op(op),
            may_draw=may_draw,
            can_run_again=can_run_again,
            runs_once=not can_run_again and facts.replay_reason is None and not facts.is_ignored,
        )
    return facts


def _examined(op: Any) -> OpFacts:
    # prim: questions (device, layout) that C++ asks where an error would end the process
    if op in SAC_IGNORED_OPS or getattr(op, "namespace", None) in ("profiler", "prim"):
        return OpFacts(is_ignored=True)
    schema = getattr(op, "_schema", None)
    is_random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    if schema is None:
        if str(op).endswith("_mutation"):  # a kernel of the user's that writes its arguments
            return OpFacts(replay_reason="in_place", is_random=is_random, writes_anything=True)
        return OpFacts(is_random=is_random)
    if op.overloadpacket.__name__ == "wait_tensor" and op.namespace in _COLLECTIVES:
        return OpFacts(replay_reason="view", is_wait=True)
    if op.namespace == "c10d":
        return OpFacts(replay_reason="collective", is_random=is_random, writes_anything=True)
    writes = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if schema.is_mutable:
        writes_lists = op.overloadpacket.__name__.startswith("_foreach_")
        return OpFacts(replay_reason="in_place", is_random=is_random, writes=writes, writes_lists=writes_lists)
    if any(result.alias_info is not None for result in schema.returns) or op in _SILENT_VIEWS:
        return OpFacts(replay_reason="view", is_random=is_random)
    if _is_factory(op, schema):
        return OpFacts(replay_reason="factory", is_random=is_random)
    return OpFacts(is_random=is_random, may_be_weight_cast=op is torch.ops.aten._to_copy.default)


def wait_for(output: Any) -> None:
    """Wait, on the current stream, until the output of a functional collective is filled."""
    tensors = output if isinstance(output, tuple | list) else (output,)
    for tensor in tensors:
        torch.ops._c10d_functional.wait_tensor(tensor)


def is_weight_cast(args: Any) -> bool:
    """Whether a parameter is cast, or another leaf that wants a gradient.

    Autocast caches such casts, so a replay may run one that forward did not, or skip it.
    """
    source = args[0]
    return isinstance(source, torch.nn.Parameter) or (source.requires_grad and source.is_leaf)


def move_versions(facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> None:
    """Move the versions of the tensors that a ``_foreach`` op writes.

    Torch does that itself, except under a dispatch mode.
    """
    for at in facts.writes:
        written = kwargs.get(at) if isinstance(at, str) else args[at] if at < len(args) else None
        if isinstance(written, list | tuple):
            torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])


def _is_factory(op: Any, schema: Any) -> bool:  # torch._ops.OpOverload, torch.FunctionSchema
    name = op.overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):
        return True
    return not any("Tensor" in str(argument.type) for argument in schema.arguments)
