"""``checkpoint`` and ``swap`` on MindSpore: its own non-reentrant recompute, with our contexts inside and hooks outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import mindspore

from hyper_parallel.backends.mindspore.draws import Drawing
from hyper_parallel.backends.mindspore.first_step import noted
from hyper_parallel.backends.mindspore.graph import next_sequence, note_second_order
from hyper_parallel.backends.mindspore.region_state import RegionState
from hyper_parallel.backends.mindspore.saved_tensors import AsyncSaveOnCpu, TensorPolicy
from hyper_parallel.backends.mindspore.selective import create_selective_checkpoint_contexts
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.contexts import Nested, Replay
from hyper_parallel.core.activation_checkpoint.flat_inputs import RegionCall
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.errors import PolicyError
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["checkpoint", "framework_checkpoint", "label_of", "noop_context_fn", "swap"]

ContextPair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

_FOREIGN_OPTIONS: Final = ("determinism_check", "debug")
"""Options of other checkpoint functions, which MindSpore would hand to the region as arguments."""
_RANDOM_STATE_OPTIONS: Final = ("preserve_rng_state", "save_rng_state")
"""One option under two names: torch's and MindSpore's own."""
_FRAMEWORK_KEYWORDS: Final = frozenset({"use_reentrant", "output_recompute", *_RANDOM_STATE_OPTIONS, *_FOREIGN_OPTIONS})
_RECOMPUTE_ALL: Final = ByOpName({})


def label_of(function: Any) -> str:
    """The function or cell as errors name it."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, mindspore.nn.Cell):
        return type(getattr(owner, "unwrap_cell", owner)).__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def noop_context_fn() -> ContextPair:
    """A pair of contexts that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def _keep_random_ops() -> ContextPair:
    return create_selective_checkpoint_contexts(_RECOMPUTE_ALL)


def framework_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context_fn: Callable[[], Any] | None = None,
    early_stop: bool = False,
    **kwargs: Any,
) -> Any:
    """``mindspore.recompute``, always in its non-reentrant form. With ``context_fn`` random ops are the caller's care.

    On the CPU MindSpore cannot draw the same random numbers again, so without ``context_fn`` the ops that draw are kept
    there and everything else is recomputed. With ``preserve_rng_state=False`` (``save_rng_state`` is MindSpore's name for
    it) random numbers are neither kept nor drawn again: the recomputation draws others. ``early_stop`` is off unless asked
    for: in MindSpore 2.10 it fails where the region's last saved value is made by one of the older primitives, such as a
    LayerNorm.
    """
    preserves = _pop_random_state_option(kwargs)
    if kwargs.pop("use_reentrant", False):
        raise ValueError(
            "checkpoint: use_reentrant=True is not the form that serves functions and contexts; leave it out"
        )
    foreign = [option for option in _FOREIGN_OPTIONS if option in kwargs]
    if foreign:
        raise ValueError(
            f"checkpoint: {foreign} are not options of mindspore.recompute; leave them out. Known are context_fn, "
            "early_stop, output_recompute and preserve_rng_state"
        )
    if context_fn is None and preserves and on_cpu():
        context_fn = _keep_random_ops
    return mindspore.recompute(
        function,
        *args,
        use_reentrant=False,
        context_fn=context_fn,
        early_stop=early_stop,
        save_rng_state=preserves,
        **kwargs,
    )


def _pop_random_state_option(kwargs: dict[str, Any]) -> bool:
    """Whether a recomputation shall draw the same random numbers, taken out of ``kwargs``; yes unless it is said."""
    given = {name: bool(kwargs.pop(name)) for name in _RANDOM_STATE_OPTIONS if name in kwargs}
    if len(set(given.values())) > 1:
        raise ValueError(f"checkpoint: {given} contradict each other; they are two names of one option, give one")
    return next(iter(given.values()), True)


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
    """See ``hyper_parallel.checkpoint``. ``early_stop`` is taken and not used: see :func:`framework_checkpoint`."""
    if not callable(function):
        raise TypeError(f"checkpoint: expected a cell or a callable, got {function!r}")
    where = f"checkpoint of {label_of(function)}"
    position = Position(next_sequence())
    preserves = _pop_random_state_option(kwargs)
    options = {name: kwargs.pop(name) for name in _FRAMEWORK_KEYWORDS & kwargs.keys()}
    call = RegionCall(where, function, args, kwargs, is_tensor=_is_tensor, is_flat=swap_inputs)
    # On Ascend MindSpore restores the device's random state itself: nothing need be kept where nothing is asked for.
    policy = policy_fn if policy_fn is not None or not preserves or not on_cpu() else _RECOMPUTE_ALL

    def contexts() -> ContextPair:
        pairs: list[Any] = [] if context_fn is None else [context_fn()]
        state = None
        if compat.is_recording():  # else nothing is replayed
            state = RegionState(where, call.region, call.take_objects(), keeps_random_state=preserves)
            pairs.append((state, state.replay()))
        if policy is not None:
            pairs.append(
                create_selective_checkpoint_contexts(
                    policy,
                    swap_config=swap_config,
                    where=where,
                    position=position,
                    preserves_draws=preserves,
                    state=state,
                )
            )
        elif preserves:
            drawing = Drawing()
            pairs.append((drawing, Replay(drawing)))
        return Nested(*(pair[0] for pair in pairs)), Nested(*(pair[1] for pair in pairs))

    options |= {"context_fn": contexts, "preserve_rng_state": preserves}
    if not swap_inputs:
        with contextlib.nullcontext() if compat.has_saved_tensors_hooks() else _Inputs():
            output = framework_checkpoint(call.function, *call.take_args(), **options, **call.kwargs)
        return noted(output, is_recomputed=True)
    with AsyncSaveOnCpu(swap_config=swap_config, where=f"inputs of {where}", position=position):
        output = framework_checkpoint(call.function, *call.take_args(), **options, **call.kwargs)
    position.sequence = next_sequence()
    return noted(output, is_recomputed=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, mindspore.Tensor)


class _Inputs(mindspore.saved_tensors_hooks):  # type: ignore[misc]
    """Sees when backward asks for a region's inputs, which stay as they are; see :func:`note_second_order`."""

    def __init__(self) -> None:
        super().__init__(_same, _noted)


def _same(tensor: Any) -> Any:
    return tensor


def _noted(tensor: Any) -> Any:
    note_second_order()
    return tensor


def swap(
    function: Callable[..., Any],
    *args: Any,
    policy_fn: TensorPolicy | None = None,
    swap_config: SwapConfig | None = None,
    **kwargs: Any,
) -> Any:
    """See ``hyper_parallel.swap``."""
    if not callable(function):
        raise TypeError(f"swap: expected a cell or a callable, got {function!r}")
    where = f"swap of {label_of(function)}"
    if policy_fn is not None and not callable(policy_fn):
        raise PolicyError(f"{where}: the tensor policy must be a function of one tensor, got {policy_fn!r}")
    owner = getattr(function, "__self__", function)
    parameters = owner.get_parameters() if isinstance(owner, mindspore.nn.Cell) else ()
    with AsyncSaveOnCpu(policy_fn, swap_config=swap_config, where=where, parameters=parameters):
        output = function(*args, **kwargs)
    return noted(output, is_recomputed=False)
