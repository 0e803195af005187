"""Regions that torch.compile traces: the fates of a policy become tags on the ops of the traced graph.

Dynamo turns torch's own checkpoint into a higher-order op, so that a wrapper inside a traced function does not break the graph.
AOTAutograd then runs the region under torch's selective contexts. The policy is asked there, once for each op of the graph, and
the partitioner puts what is to be recomputed into the backward graph. No policy runs when the compiled code runs.

* *Fates.* Save is ``MUST_SAVE``, recompute is ``PREFER_RECOMPUTE``. Ops whose outputs are never kept (``ops.py``) are recomputed.
* *Swapping.* A graph cannot swap. What the policy swaps is saved by the graph. Where the region is the whole graph
  (``compiled_calls.py``) hooks around it swap those values; elsewhere they stay on the device, with one :class:`CompileWarning`.
  A wrapper may name the ops whose kept outputs it swaps (``InGraph.swapped``). Wrappers whose policies keep the same values
  share one graph then, whatever each of them swaps.
* *Guards.* Dynamo compares functions by their code, also where they close over different values. So a policy travels in a
  :class:`GraphRegion`, which dynamo compares by identity. Equal policies share one, and so blocks with equal policies share
  compiled code.
* *Graphs that are not traced by AOTAutograd* (``backend="eager"``, and a region that dynamo could not trace): the region runs
  op by op, under the contexts of an uncompiled region. Torch keeps no random state there, so the contexts do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

import torch
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from hyper_parallel.backends.torch.op_names import op_name, op_overload
from hyper_parallel.backends.torch.ops import facts_of
from hyper_parallel.backends.torch.random_state import RandomState
from hyper_parallel.backends.torch.saved_places import KeptOp, OpKey, TracedGraph, watch_saved_places
from hyper_parallel.backends.torch.selective import create_selective_checkpoint_contexts
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.call_keywords import CHECKPOINT_SETTINGS
from hyper_parallel.core.activation_checkpoint.calls import ContextPair
from hyper_parallel.core.activation_checkpoint.contexts import Nested
from hyper_parallel.core.activation_checkpoint.policy import PolicyContext, PolicyTable, fate_of_op
from hyper_parallel.core.activation_checkpoint.step_memory import MemoryChange
from hyper_parallel.errors import CompileWarning
from hyper_parallel.fates import Fate
from hyper_parallel.platform.torch import compat

__all__ = ["GraphRegion", "InGraph", "graph_region", "region_in_graph", "run_in_graph", "warn_of_saved_swaps"]

_CONTEXT: Final = PolicyContext()
_SAID: Final = threading.Event()  # the warning below was given
_SAVED_SWAPS: Final = (
    "what is to be swapped inside this compiled function stays on the device, because one graph cannot swap. Compile block by "
    "block, with the wrapper around the compiled block: checkpoint_wrapper(torch.compile(block), ...), "
    "swap_wrapper(torch.compile(block)), or wrapped_block.compile()."
)


class GraphRegion:
    """What a traced region is to recompute; made by :func:`graph_region` alone."""

    def __init__(self, policy: Any, where: str) -> None:
        self.policy = policy  # None: everything is recomputed
        self.where = where

    def __reduce__(self) -> Any:  # copies of a model share compiled code
        return graph_region, (self.policy, self.where)


_REGIONS: weakref.WeakValueDictionary[Hashable, GraphRegion] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def graph_region(policy: Any, where: str) -> GraphRegion:
    """The region with this policy; the same object for equal policies."""
    try:
        hash(policy)
        key: Hashable = (policy, where)
    except TypeError:
        key = (id(policy), where)  # the region holds the policy, so that its id names nothing else
    with _LOCK:
        region = _REGIONS.get(key)
        if region is None:
            region = _REGIONS[key] = GraphRegion(policy, where)
        return region


@dataclasses.dataclass(frozen=True, kw_only=True)
class InGraph:
    """What a wrapper does where its module is compiled."""

    region: GraphRegion | None  # None: nothing is recomputed, and what the module saves is to be swapped
    bound: dict[str, Any]  # keywords of the module that the wrapper was made with
    swap_config: SwapConfig | None = None
    swaps_inputs: bool = False
    swapped: frozenset[OpKey] | None = None  # of the ops that the policy keeps; None: those that it answers to swap
    predicted: MemoryChange | None = None  # what the line about the first step names

    @property
    def may_swap(self) -> bool:
        """Whether hooks around the graph have anything to do."""
        asks_policy = self.swapped is None and self.region is not None and self.region.policy is not None
        return self.swaps_inputs or asks_policy or bool(self.swapped)


def region_in_graph(function: Callable[..., Any], keywords: dict[str, Any], label: str) -> InGraph | None:
    """What a wrapper with this checkpoint function is in a traced graph; None where only the function itself knows.

    A checkpoint function may say it itself, with a method ``in_graph(label)``.
    """
    says: Callable[[str], InGraph | None] | None = getattr(function, "in_graph", None)
    if says is not None:
        return says(label)
    if getattr(function, "is_traced_by_torch", False) is False or keywords.get("context_fn") is not None:
        return None
    bound = {name: value for name, value in keywords.items() if name not in CHECKPOINT_SETTINGS}
    region = graph_region(keywords.get("policy_fn"), f"checkpoint of {label}")
    swap_config, swaps_inputs = keywords.get("swap_config"), bool(keywords.get("swap_inputs"))
    return InGraph(region=region, bound=bound, swap_config=swap_config, swaps_inputs=swaps_inputs)


def run_in_graph(
    region: GraphRegion, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], graph: int | None = None
) -> Any:
    """Call the function as a region of the graph that dynamo traces now.

    ``graph``: a number for the traced graph, where the region is all of it and hooks around it may swap.
    """

    def call() -> Any:  # dynamo makes arguments of the tensors that it closes over, also of those in containers
        return function(*args, **kwargs)

    contexts = functools.partial(contexts_in_graph, region, graph)
    return torch.utils.checkpoint.checkpoint(call, use_reentrant=False, context_fn=contexts)


def contexts_in_graph(region: GraphRegion, graph: int | None) -> ContextPair:
    """The contexts of one region; called while AOTAutograd traces, or while the graph runs op by op."""
    if not compat.is_tracing_autograd():
        return _contexts_op_by_op(region)
    traced = None if graph is None else watch_saved_places(graph)
    contexts: ContextPair = torch_contexts(_TracedPolicy(region, graph, traced))
    return contexts


@compat.constant_in_graph
def warn_of_saved_swaps() -> None:
    """Say once in a process that swaps inside a graph are saves. Dynamo calls this while it traces."""
    if not _SAID.is_set():
        _SAID.set()
        warnings.warn(f"hyper_parallel: {_SAVED_SWAPS}", CompileWarning, stacklevel=2)


class _TracedPolicy:
    """A policy of ours, asked by torch's selective contexts."""

    def __init__(self, region: GraphRegion, graph: int | None, traced: TracedGraph | None) -> None:
        self._region = region
        self._graph = graph
        self._traced = traced
        self._answers: dict[Any, Fate | Callable[[], Fate]] = {}

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> TorchPolicy:
        """Torch's answer for one op. AOTAutograd runs the region twice, and the graph is made by one of them."""
        if not compat.is_making_graph() or self._region.policy is None:
            return TorchPolicy.PREFER_RECOMPUTE
        if facts_of(op).replay_reason is not None:
            return TorchPolicy.PREFER_RECOMPUTE
        fate = self._fate_of(op, args, kwargs)
        is_marked = self._mark(ctx, op, fate)
        if fate is Fate.RECOMPUTE:
            return TorchPolicy.PREFER_RECOMPUTE
        if fate is Fate.SWAP and not is_marked:
            warn_of_saved_swaps()
        return TorchPolicy.MUST_SAVE

    def _mark(self, ctx: Any, op: Any, fate: Fate) -> bool:
        """Count the op; mark the output of one that is kept, for the hooks around the graph. False: it cannot be marked."""
        traced = self._traced
        if traced is None or self._graph is None:
            return False
        name = op_name(op), op_overload(op)
        number = traced.asked[name]
        traced.asked[name] += 1
        if fate is not Fate.RECOMPUTE:
            kept = KeptOp((*name, number), fate is Fate.SWAP)
            traced.is_marked &= compat.mark_outputs(ctx, self._graph, kept)
        return traced.is_marked

    def _fate_of(self, op: Any, args: Any, kwargs: dict[str, Any]) -> Fate:
        region = self._region
        if not isinstance(region.policy, PolicyTable):
            return fate_of_op(region.policy(_CONTEXT, op, *args, **kwargs), op, where=region.where)
        if op not in self._answers:
            self._answers[op] = self._look_up(region.policy, op)
        answer = self._answers[op]
        return answer if isinstance(answer, Fate) else answer()

    def _look_up(self, policy: PolicyTable, op: Any) -> Fate | Callable[[], Fate]:
        where, given = self._region.where, policy.answers_for(op)
        if isinstance(given, Mapping):
            fates = {at: fate_of_op(answer, op, where=where) for at, answer in given.items()}
            count = itertools.count()
            return lambda: fates.get(next(count), Fate.RECOMPUTE)
        if callable(given):
            return lambda: fate_of_op(given(), op, where=where)
        return fate_of_op(given, op, where=where)


def _contexts_op_by_op(region: GraphRegion) -> ContextPair:
    state = RandomState.of_devices()
    pairs: list[Any] = [(contextlib.nullcontext(), _SameDraws(state))]
    if region.policy is not None:
        pairs.append(create_selective_checkpoint_contexts(region.policy, where=region.where))
    return Nested(*(pair[0] for pair in pairs)), Nested(*(pair[1] for pair in pairs))


class _SameDraws:
    """Around a replay: it draws what forward drew, and the generators are where they were afterwards."""

    def __init__(self, state: RandomState) -> None:
        self._state = state
        self._displaced: dict[Any, Callable[[], None]] = {}

    def __enter__(self) -> None:
        self._state.restore(self._displaced)

    def __exit__(self, *exc: object) -> None:
        while self._displaced:
            self._displaced.popitem()[1]()
