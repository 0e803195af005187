"""``checkpoint`` and ``swap`` on torch: torch's own non-reentrant checkpoint, with our contexts inside and our hooks outside.

Note: hooks around selective checkpointing
    From 2.15 on torch's checkpoint wants to be told whether values that its own selective contexts save go through the hooks
    around the call (``respect_saved_tensors_hooks``), and warns where it is not. Where the hooks are ours the answer is no, as
    it was in every release before: a value that a policy saves stays on the device, and ``swap_inputs`` moves inputs alone.
    Where the hooks are the caller's, and where the caller answers, torch's own meaning holds.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.region_bytes import counted
from hyper_parallel.backends.torch.region_identity import owner_of
from hyper_parallel.backends.torch.region_state import RegionState
from hyper_parallel.backends.torch.saved_tensors import AsyncSaveOnCpu, unpack
from hyper_parallel.backends.torch.selective import create_selective_checkpoint_contexts
from hyper_parallel.backends.torch.tape import region_or_reason
from hyper_parallel.backends.torch.tape_policies import ObservedReplays, SwappedOutputs
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.backends.torch.transformers_cache import refuse_left_out_caches, with_own_cache
from hyper_parallel.backends.torch.unseen_writes import known_writes_of
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.calls import (
    Calls,
    CheckpointCall,
    ContextPair,
    Recomputation,
    RecordedCall,
    is_in_replayed_region,
    noop_context_fn,
)
from hyper_parallel.core.activation_checkpoint.contexts import Nested
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.platform.eager import EAGER_REASON
from hyper_parallel.platform.torch import compat

__all__ = ["checkpoint", "framework_checkpoint", "noop_context_fn", "swap"]


def framework_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's own checkpoint, always non-reentrant."""
    if kwargs.pop("use_reentrant", False):
        raise ValueError("checkpoint: use_reentrant=True is not supported; leave it out or give False")
    return compat.checkpoint(function, *args, **kwargs)


class TorchCalls(Calls):
    """See :class:`Calls`. Torch's exceptions: a cache of transformers, ``debug``, ``respect_saved_tensors_hooks``."""

    tensors = TENSORS
    hooks = AsyncSaveOnCpu
    state_class = RegionState
    module_word = "module"
    framework_keywords = frozenset(
        {"use_reentrant", "preserve_rng_state", "determinism_check", "debug"}
        | ({compat.RESPECT_HOOKS} if compat.TAKES_RESPECT_HOOKS else set())
    )

    def take_random_state_option(self, options: dict[str, Any]) -> bool:
        """See the base class. The option stays: torch's checkpoint keeps the states of the devices of the inputs."""
        return bool(options.get("preserve_rng_state", True))

    def prepared(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """See the base class."""
        return with_own_cache(function, args, kwargs)

    def recorded(self, call: RecordedCall) -> Recomputation | None:
        """See the base class."""
        if not torch.is_grad_enabled():
            return None
        region = region_or_reason(call)
        if isinstance(region, str):
            is_replay = (
                is_in_replayed_region() and is_in_backward()
            )  # of a region around it: this call was counted in forward
            if not is_replay:
                SwapManager().counters.count_region(owner_of(call.function), region)
            return None
        refuse_left_out_caches(call.function, call.args, call.kwargs)
        observed = ObservedReplays.of(call.function)
        swaps = (
            observed if call.policy is None else SwappedOutputs(call.where, call.swap_config, call.position, observed)
        )
        config = call.swap_config or current_config()
        return functools.partial(
            region.run,
            call.where,
            call.function,
            call.args,
            call.kwargs,
            call.policy,
            swaps,
            proves_again=config.verify,
        )

    def run_replayable(self, call: CheckpointCall) -> Any:
        """See the base class. Without gradients nothing is replayed.

        With ``debug`` torch takes no contexts, and says so where they were asked for.
        """
        options = call.options
        asks_for_contexts = call.context_fn is not None or call.policy_fn is not None
        if asks_for_contexts or (torch.is_grad_enabled() and not options.get("debug")):
            options = _answering_for_hooks(functools.partial(self.replay_contexts, call), options)
        region = call.region
        if call.policy_fn is not None:
            call.known = known_writes_of(region.region, region.objects)
        call.watched.extend(weakref.ref(value) for value in region.args if isinstance(value, torch.Tensor))
        return framework_checkpoint(
            counted(region.function), *region.take_args(), early_stop=call.early_stop, **options, **region.kwargs
        )

    def policy_pairs(self, call: CheckpointCall, state: RegionState | None) -> list[Any]:
        """See the base class."""
        pairs: list[Any] = []
        if call.policy_fn is not None:
            pairs.append(
                create_selective_checkpoint_contexts(
                    call.policy_fn,
                    swap_config=call.swap_config,
                    where=call.where,
                    position=call.position,
                    known=call.known,
                )
            )
        if state is not None:
            state.watch_arguments(call.watched)
            # Innermost: backward also reads the arguments of an op whose value the policy's replay hands out.
            pairs.append((contextlib.nullcontext(), state.watch()))
        return pairs


def _answering_for_hooks(context_fn: Callable[[], ContextPair], options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call with its contexts, and the answer that 2.15 asks for (see "hooks around selective ...")."""
    if not compat.TAKES_RESPECT_HOOKS:
        return {**options, "context_fn": context_fn}
    respects_hooks = options.get(compat.RESPECT_HOOKS)
    if respects_hooks is None and _are_ours(compat.hooks_around_checkpoint()):
        respects_hooks = False

    def contexts() -> ContextPair:
        forward, replay = context_fn()
        if isinstance(forward, Nested):
            _answer_for_hooks(forward, respects_hooks)
        return forward, replay

    return {**options, "context_fn": contexts, compat.RESPECT_HOOKS: respects_hooks}


def _answer_for_hooks(nested: Nested, respects_hooks: bool | None) -> None:
    """Torch sets this on a selective context of its own; among several contexts it would not find one."""
    for context in nested.contexts:
        mode = compat.selective_mode(context)
        if mode is not None:
            setattr(mode, compat.RESPECT_HOOKS, respects_hooks)


def _are_ours(hooks: Any) -> bool:
    return hooks is not None and hooks[1] is unpack


_CALLS = TorchCalls()


@compat.run_eagerly(EAGER_REASON)
def checkpoint(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """See ``hyper_parallel.checkpoint``."""
    return _CALLS.checkpoint(function, *args, **keywords)


# A wrapper with one of these functions puts its region into a traced graph (graph_regions.py).
checkpoint.is_traced_by_torch = framework_checkpoint.is_traced_by_torch = True  # type: ignore[attr-defined]


@compat.run_eagerly(EAGER_REASON)
def swap(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """See ``hyper_parallel.swap``."""
    return _CALLS.swap(function, *args, **keywords)
