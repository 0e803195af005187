"""What an op is, as far as keeping its output goes.

MindSpore's dispatch shows a name and arguments and no schema. What a name says is decided here; whether an op is a view
or a factory is seen when it ran: a view's output lies in an input's storage, a factory had no tensor to read.

Never kept, always replayed, whatever a policy says: ops that write in place, views, factories, collectives. Never
replayed, always kept: ops that draw random numbers, because on the CPU no state brings the same numbers again, and on
Ascend a kept one would leave the state of the next behind.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, Final

import mindspore

from hyper_parallel.backends.mindspore.op_registry import remember_op
from hyper_parallel.backends.mindspore.storages import storage_key
from hyper_parallel.core.activation_checkpoint.adapter import instances_in

__all__ = ["OpFacts", "facts_of", "inputs_of", "replay_reason", "tensors_in"]

_IGNORED: Final = frozenset({"StopGradient"})
"""MindSpore's recompute detaches what it packs; forward and replay do so a different number of times."""
_COLLECTIVE: Final = re.compile(
    r"DistComm|InnerComm|^(AllReduce|AllGather|Broadcast$|ReduceScatter|Reduce$|AlltoAll|Send$|Receive$|NeighborExchange)"
)
_IN_PLACE: Final = re.compile(r"^(Inplace|Assign)|^Scatter(Nd)?(Update|Add|Sub|Mul|Div|Min|Max)$|^(Index|Masked)\w+_$")
_RANDOM: Final = re.compile(
    r"dropout(?!\w*grad)|rand|uniform|normal(?!i)|laplace|bernoulli|multinomial|^gamma$|poisson|cauchy|geometric"
    r"|exponential|rrelu$|candidatesampler|nondeterministic",
    re.I,
)
"""Names of ops that draw: StandardNormal, UniformReal, RandpermV2, Dropout2D ..., but not Normalize, Lgamma, GridSampler2D."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpFacts:
    """What an op's name says of it."""

    is_ignored: bool
    is_random: bool
    writes_first: bool  # its first tensor is changed in place
    is_collective: bool


@functools.lru_cache(maxsize=4096)
def facts_of(name: str) -> OpFacts:
    """The facts of an op of this name, which a mode of ours has met."""
    remember_op(name)
    return OpFacts(
        is_ignored=name in _IGNORED,
        is_random=_RANDOM.search(name) is not None,
        writes_first=_IN_PLACE.search(name) is not None,
        is_collective=_COLLECTIVE.search(name) is not None,
    )


def inputs_of(args: Any) -> Any:
    """The op's own arguments: the older primitives come as (primitive, name, arguments)."""
    is_older_primitive = len(args) == 3 and isinstance(args[1], str) and isinstance(args[2], tuple | list)
    return tuple(args[2]) if is_older_primitive else args


tensors_in = functools.partial(instances_in, mindspore.Tensor)


def replay_reason(facts: OpFacts, args: Any, output: Any) -> str | None:
    """Why an op that ran must run again whatever a policy says; None when its output may be kept."""
    if facts.is_collective:
        return "collective"
    if facts.writes_first:
        return "in_place"
    inputs = tensors_in(args)
    if not inputs:
        return "factory"
    made = [tensor for tensor in tensors_in((output,)) if tensor.size]
    read = {storage_key(tensor) for tensor in inputs if tensor.size}
    return "view" if any(storage_key(tensor) in read for tensor in made) else None
