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
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.backends.torch.devices import refuse_capture
from hyper_parallel.backends.torch.first_step import noted
from hyper_parallel.backends.torch.graph import next_sequence
from hyper_parallel.backends.torch.region_state import RegionState
from hyper_parallel.backends.torch.saved_tensors import AsyncSaveOnCpu, TensorPolicy, unpack
from hyper_parallel.backends.torch.selective import create_selective_checkpoint_contexts
from hyper_parallel.backends.torch.transformers_cache import with_own_cache
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.contexts import Nested
from hyper_parallel.core.activation_checkpoint.flat_inputs import RegionCall
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PolicyError
from hyper_parallel.platform.eager import EAGER_REASON
from hyper_parallel.platform.torch import compat

__all__ = ["checkpoint", "framework_checkpoint", "label_of", "noop_context_fn", "swap"]

ContextPair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def label_of(function: Any) -> str:
    """The function or module as errors name it."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, torch.nn.Module):
        return type(getattr(owner, "wrapped_module", owner)).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def noop_context_fn() -> ContextPair:
    """A pair of contexts that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def framework_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's own checkpoint, always non-reentrant."""
    if kwargs.pop("use_reentrant", False):
        raise ValueError("checkpoint: use_reentrant=True is not supported; leave it out or give False")
    return compat.checkpoint(function, *args, **kwargs)


class _Nested(Nested):
    """Several contexts as one, which may hold a selective context of torch's own."""

    def answer_for_hooks(self, respects_hooks: bool | None) -> None:
        """Torch sets this on a selective context of its own; in here it would not find one."""
        for context in self.contexts:
            mode = compat.selective_mode(context)
            if mode is not None:
                setattr(mode, compat.RESPECT_HOOKS, respects_hooks)


@compat.run_eagerly(EAGER_REASON)
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    context_fn: Callable[[], ContextPair] | None = None,
    early_stop: bool = True,
    swap_config: SwapConfig | None = None,
    **kwargs: Any,
) -> Any:
    """See ``hyper_parallel.checkpoint``."""
    if not callable(function):
        raise TypeError(f"checkpoint: expected a module or a callable, got {function!r}")
    where = f"checkpoint of {label_of(function)}"
    options = {name: kwargs.pop(name) for name in _FRAMEWORK_KEYWORDS & kwargs.keys()}
    keeps_random_state = options.get("preserve_rng_state", True)
    call = _Call(where, with_own_cache(function, args, kwargs), args, kwargs, is_tensor=_is_tensor, is_flat=swap_inputs)
    if policy_fn is not None or swap_inputs:
        refuse_capture(where)
    position = Position(next_sequence())

    def contexts() -> ContextPair:
        pairs = [] if context_fn is None else [context_fn()]
        state = call.state(keeps_random_state=keeps_random_state) if torch.is_grad_enabled() else None
        if state is not None:
            pairs.append((state, state.replay()))
        if policy_fn is not None:
            pairs.append(
                create_selective_checkpoint_contexts(policy_fn, swap_config=swap_config, where=where, position=position)
            )
        if state is not None:
            # Innermost: backward also reads the arguments of an op whose value the policy's replay hands out.
            pairs.append((contextlib.nullcontext(), state.watch()))
        return _Nested(*(pair[0] for pair in pairs)), _Nested(*(pair[1] for pair in pairs))

    # Without gradients nothing is replayed. With ``debug`` torch takes no contexts, and says so where they were asked for.
    needs_contexts = context_fn is not None or policy_fn is not None
    if needs_contexts or (torch.is_grad_enabled() and not options.get("debug")):
        run = functools.partial(call.run, early_stop=early_stop, context_fn=contexts, **options)
    else:
        run = functools.partial(call.run, early_stop=early_stop, **options)
    if not swap_inputs:
        return run()
    with AsyncSaveOnCpu(swap_config=swap_config, where=f"inputs of {where}", position=position):
        output = run()
    position.sequence = next_sequence()
    SwapManager().relieve()
    return output


def _answering_for_hooks(
    context_fn: Callable[[], ContextPair], options: dict[str, Any]
) -> tuple[Callable[[], ContextPair], dict[str, Any]]:
    """The contexts and options of a call, with the answer that 2.15 asks for (see "hooks around selective checkpointing")."""
    if not compat.TAKES_RESPECT_HOOKS:
        return context_fn, options
    respects_hooks = options.get(compat.RESPECT_HOOKS)
    if respects_hooks is None and _are_ours(compat.hooks_around_checkpoint()):
        respects_hooks = False

    def contexts() -> ContextPair:
        forward, replay = context_fn()
        if isinstance(forward, _Nested):
            forward.answer_for_hooks(respects_hooks)
        return forward, replay

    return contexts, {**options, compat.RESPECT_HOOKS: respects_hooks}


def _are_ours(hooks: Any) -> bool:
    return hooks is not None and hooks[1] is unpack


_FRAMEWORK_KEYWORDS = frozenset(
    {"use_reentrant", "preserve_rng_state", "determinism_check", "debug"}
    | ({compat.RESPECT_HOOKS} if compat.TAKES_RESPECT_HOOKS else set())
)


class _Call(RegionCall):
    """One call of a region, laid out for torch's checkpoint.

    Torch's checkpoint looks after the tensors among its positional arguments alone: it saves them, checks their versions, and
    keeps the random states of their devices. Tensors that come otherwise are passed by position too.
    """

    def state(self, *, keeps_random_state: bool) -> RegionState:
        """What gives a replay the state that forward found."""
        return RegionState(self.where, self.region, self.take_objects(), keeps_random_state=keeps_random_state)

    def run(self, **options: Any) -> Any:
        """Run it under torch's checkpoint. The arguments are torch's from here on."""
        if "context_fn" in options:
            context_fn, options = _answering_for_hooks(options.pop("context_fn"), options)
            options["context_fn"] = context_fn
        output = framework_checkpoint(self.function, *self.take_args(), **options, **self.kwargs)
        return noted(output, is_recomputed=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


@compat.run_eagerly(EAGER_REASON)
def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: TensorPolicy | None = None,
    swap_config: SwapConfig | None = None,
    **kwargs: Any,
) -> Any:
    """See ``hyper_parallel.swap``."""
    if not callable(function):
        raise TypeError(f"swap: expected a module or a callable, got {function!r}")
    if policy_fn is not None and not callable(policy_fn):
        raise PolicyError(
            f"swap of {label_of(function)}: the tensor policy must be a function of one tensor, got {policy_fn!r}"
        )
    with AsyncSaveOnCpu(policy_fn, swap_config=swap_config, where=f"swap of {label_of(function)}"):
        output = function(*args, **kwargs)
    return noted(output, is_recomputed=False)
