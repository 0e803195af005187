"""``checkpoint`` and ``swap`` on MindSpore: its own non-reentrant recompute, with our contexts inside and hooks outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import mindspore

from hyper_parallel.backends.mindspore.draws import Drawing
from hyper_parallel.backends.mindspore.graph import remember_second_order
from hyper_parallel.backends.mindspore.graph_mode import refuse_graphs
from hyper_parallel.backends.mindspore.region_state import RegionState
from hyper_parallel.backends.mindspore.replayed_values import CheckedReplays
from hyper_parallel.backends.mindspore.saved_tensors import AsyncSaveOnCpu
from hyper_parallel.backends.mindspore.selective import create_selective_checkpoint_contexts
from hyper_parallel.backends.mindspore.storages import storage_key, unseen
from hyper_parallel.backends.mindspore.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.calls import Calls, CheckpointCall, ContextPair, noop_context_fn
from hyper_parallel.core.activation_checkpoint.contexts import Replay
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["checkpoint", "framework_checkpoint", "noop_context_fn", "swap"]

_FOREIGN_OPTIONS: Final = {"determinism_check": "default", "debug": False}
"""Options of torch's checkpoint and their defaults. Other values are refused: MindSpore would hand them to the region."""
_RANDOM_STATE_OPTIONS: Final = ("preserve_rng_state", "save_rng_state")
"""One option under two names: torch's and MindSpore's own."""
_FRAMEWORK_KEYWORDS: Final = frozenset({"use_reentrant", "output_recompute", *_RANDOM_STATE_OPTIONS, *_FOREIGN_OPTIONS})
_RECOMPUTE_ALL: Final = ByOpName({})


def _keep_random_ops() -> ContextPair:
    return create_selective_checkpoint_contexts(_RECOMPUTE_ALL)


def framework_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context_fn: Callable[[], Any] | None = None,
    early_stop: bool = False,
    **kwargs: Any,
) -> Any:
    """``mindspore.recompute``, always in its non-reentrant form. With ``context_fn`` the caller is responsible for random ops.

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
    foreign = [name for name, default in _FOREIGN_OPTIONS.items() if kwargs.pop(name, default) != default]
    if foreign:
        raise ValueError(
            f"checkpoint: {foreign} are not options of mindspore.recompute; leave them out. Known are context_fn, "
            "early_stop, output_recompute and preserve_rng_state"
        )
    if context_fn is None and preserves and on_cpu():
        context_fn = _keep_random_ops
    if compat.is_recording() and compat.has_saved_tensors_hooks():
        function, args = _without_leaves(function, args)
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
    """Whether a recomputation shall draw the same random numbers, taken out of ``kwargs``; yes by default."""
    given = {name: bool(kwargs.pop(name)) for name in _RANDOM_STATE_OPTIONS if name in kwargs}
    if len(set(given.values())) > 1:
        raise ValueError(f"checkpoint: {given} contradict each other; they are two names of one option, give one")
    return next(iter(given.values()), True)


class MindSporeCalls(Calls):
    """See :class:`Calls`. MindSpore's exceptions: two names for the option of random states, ops that draw are kept on the
    CPU, and ``early_stop``, which is taken and not used (see :func:`framework_checkpoint`)."""

    tensors = TENSORS
    hooks = AsyncSaveOnCpu
    state_class = RegionState
    module_word = "cell"
    framework_keywords = _FRAMEWORK_KEYWORDS

    def packer_options(self, function: Any) -> dict[str, Any]:
        """See the base class. MindSpore does not mark a view of a parameter as one."""
        owner = getattr(function, "__self__", function)
        return {"parameters": owner.get_parameters()} if isinstance(owner, mindspore.nn.Cell) else {}

    def take_random_state_option(self, options: dict[str, Any]) -> bool:
        """See the base class."""
        return _pop_random_state_option(options)

    def run_replayable(self, call: CheckpointCall) -> Any:
        """See the base class."""
        region = call.region
        has_hooks = call.swaps_inputs or compat.has_saved_tensors_hooks()
        function = CheckedReplays(region.function, call.where)
        with contextlib.nullcontext() if has_hooks else _Inputs(), function.forward():
            return framework_checkpoint(
                function,
                *region.take_args(),
                context_fn=lambda: self.replay_contexts(call),
                preserve_rng_state=call.keeps_random_state,
                **call.options,
                **region.kwargs,
            )

    def policy_pairs(self, call: CheckpointCall, state: RegionState | None) -> list[Any]:
        """See the base class. On Ascend MindSpore restores the device's random state itself: no op is kept for its draws."""
        preserves, policy = call.keeps_random_state, call.policy_fn
        if policy is None and preserves and on_cpu():
            policy = _RECOMPUTE_ALL
        if policy is None:
            drawing = Drawing()
            return [(drawing, Replay(drawing))] if preserves else []
        contexts = create_selective_checkpoint_contexts(
            policy,
            swap_config=call.swap_config,
            where=call.where,
            position=call.position,
            preserves_draws=preserves,
            state=state,
        )
        return [contexts]


class _Inputs(mindspore.saved_tensors_hooks):  # type: ignore[misc]
    """Sees when backward asks for a region's inputs, which stay as they are; see :func:`remember_second_order`."""

    def __init__(self) -> None:
        super().__init__(_same, _seen_by_backward)


def _same(tensor: Any) -> Any:
    return tensor


def _seen_by_backward(tensor: Any) -> Any:
    remember_second_order()
    return tensor


def _without_leaves(function: Callable[..., Any], args: Any) -> tuple[Callable[..., Any], Any]:
    """The function and the arguments to give to MindSpore's recompute, so that a replay gets no new leaf of the graph.

    Under saved-tensors hooks a replay gets each input as a new tensor with the old one's autograd node. MindSpore never
    frees a graph in which an older primitive, such as a LayerNorm, is given a leaf that is not an input of the
    differentiated function itself. So views of the leaves are saved for the replay; forward gets the caller's tensors.
    """
    saved = tuple(_not_a_leaf(value) for value in args)
    if all(one is other for one, other in zip(saved, args, strict=True)):
        return function, args
    return _OwnArgumentsFirst(function, args), saved


def _not_a_leaf(value: Any) -> Any:
    """A view of a leaf, with the same bytes and gradient; every other value as it is, and parameters, which live on."""
    if not isinstance(value, mindspore.Tensor) or value.param_info is not None or not compat.is_leaf(value):
        return value
    with unseen(records=True):
        view = mindspore.mint.permute(value, tuple(range(value.ndim)))
    is_same = view.dtype == value.dtype and storage_key(view) == storage_key(value)
    return view if is_same else value  # inside a cell with to_float an op may be given a cast copy


class _OwnArgumentsFirst:
    """The function of a region, called with the caller's own arguments in forward and with saved ones in a replay."""

    def __init__(self, function: Callable[..., Any], args: Any) -> None:
        self._function = function
        self._args = args

    def __call__(self, *saved: Any, **kwargs: Any) -> Any:
        """Run the function: the first call is forward, every other a replay."""
        args, self._args = self._args, None
        return self._function(*(saved if args is None else args), **kwargs)


_CALLS = MindSporeCalls()


def checkpoint(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """See ``hyper_parallel.checkpoint``."""
    refuse_graphs("checkpoint")
    return _CALLS.checkpoint(function, *args, **keywords)


def swap(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """See ``hyper_parallel.swap``."""
    refuse_graphs("swap")
    return _CALLS.swap(function, *args, **keywords)
