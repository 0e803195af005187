"""``checkpoint`` and ``swap`` on torch: torch's own non-reentrant checkpoint, with our contexts inside and our hooks outside.

Note: hooks around selective checkpointing
    From 2.15 on torch's checkpoint wants to be told whether values that its own selective contexts save go through the hooks
    around the call (``respect_saved_tensors_hooks``), and warns where it is not. Where the hooks are ours the answer is no, as
    it was in every release before: a value that a policy saves stays on the device, and ``swap_inputs`` moves inputs alone.
    Where the hooks are the caller's, and where the caller answers, torch's own meaning holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import PolicyError
from hyper_parallel.platform.base.trees import tree_map
from hyper_parallel.platform.eager import EAGER_REASON
from hyper_parallel.platform.torch import compat
from hyper_parallel.platform.torch.activation_checkpoint.devices import refuse_capture
from hyper_parallel.platform.torch.activation_checkpoint.first_step import noted
from hyper_parallel.platform.torch.activation_checkpoint.graph import next_sequence
from hyper_parallel.platform.torch.activation_checkpoint.saved_tensors import AsyncSaveOnCpu, TensorPolicy, unpack
from hyper_parallel.platform.torch.activation_checkpoint.selective import create_selective_checkpoint_contexts

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


class _Both:
    """Two contexts as one, the first outside."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer = outer
        self._inner = inner
        self._stack: contextlib.ExitStack | None = None

    def answer_for_hooks(self, respects_hooks: bool | None) -> None:
        """Torch sets this on a selective context of its own; in here it would not find one."""
        mode = compat.selective_mode(self._outer)
        if mode is not None:
            setattr(mode, compat.RESPECT_HOOKS, respects_hooks)

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._inner)
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None, "entered"
        stack, self._stack = self._stack, None
        return stack.__exit__(kind, error, trace)


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
    if not swap_inputs and _hides_its_device(args, kwargs):
        inputs = _FlatInputs(function, args, kwargs)
        function, args, kwargs = inputs.call, tuple(inputs.tensors), inputs.framework_keywords
    if policy_fn is None and not swap_inputs:
        return _run(function, args, kwargs, context_fn=context_fn, early_stop=early_stop)
    refuse_capture(where)
    position = Position(next_sequence())

    def contexts() -> ContextPair:
        ours: ContextPair = (
            noop_context_fn()
            if policy_fn is None
            else create_selective_checkpoint_contexts(
                policy_fn, swap_config=swap_config, where=where, position=position
            )
        )
        if context_fn is None:
            return ours
        theirs = context_fn()
        return _Both(theirs[0], ours[0]), _Both(theirs[1], ours[1])

    if not swap_inputs:
        return _run(function, args, kwargs, context_fn=contexts, early_stop=early_stop)
    inputs = _FlatInputs(function, args, kwargs)
    with AsyncSaveOnCpu(swap_config=swap_config, where=f"inputs of {where}", position=position):
        output = _run(
            inputs.call,
            inputs.tensors,
            inputs.framework_keywords,
            context_fn=context_fn if policy_fn is None else contexts,
            early_stop=early_stop,
        )
    position.sequence = next_sequence()
    SwapManager().relieve()
    return output


def _hides_its_device(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether tensors come by keyword alone.

    Torch's checkpoint learns from the positional ones which devices' random states to keep; with none, it keeps no device's,
    and a replayed dropout draws other numbers.
    """
    if not kwargs or any(isinstance(value, torch.Tensor) for value in args):
        return False
    return bool(_FlatInputs(_nothing, (), kwargs).tensors) and not _FlatInputs(_nothing, args, {}).tensors


def _nothing() -> None:
    """Stands for a function that is not called."""


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    *,
    context_fn: Callable[[], ContextPair] | None,
    early_stop: bool,
) -> Any:
    if context_fn is None:
        output = framework_checkpoint(function, *args, early_stop=early_stop, **kwargs)
    else:
        contexts, options = _answering_for_hooks(context_fn, kwargs)
        output = framework_checkpoint(function, *args, context_fn=contexts, early_stop=early_stop, **options)
    return noted(output, is_recomputed=True)


def _answering_for_hooks(
    context_fn: Callable[[], ContextPair], kwargs: dict[str, Any]
) -> tuple[Callable[[], ContextPair], dict[str, Any]]:
    """The contexts and keywords of a call, with the answer that 2.15 asks for (see "hooks around selective checkpointing")."""
    if not compat.TAKES_RESPECT_HOOKS:
        return context_fn, kwargs
    respects_hooks = kwargs.get(compat.RESPECT_HOOKS)
    if respects_hooks is None and _are_ours(compat.hooks_around_checkpoint()):
        respects_hooks = False

    def contexts() -> ContextPair:
        forward, replay = context_fn()
        if isinstance(forward, _Both):
            forward.answer_for_hooks(respects_hooks)
        return forward, replay

    return contexts, {**kwargs, compat.RESPECT_HOOKS: respects_hooks}


def _are_ours(hooks: Any) -> bool:
    return hooks is not None and hooks[1] is unpack


_FRAMEWORK_KEYWORDS = frozenset(
    {"use_reentrant", "preserve_rng_state", "determinism_check", "debug"}
    | ({compat.RESPECT_HOOKS} if compat.TAKES_RESPECT_HOOKS else set())
)


class _FlatInputs:
    """A call with its tensors laid out flat.

    Torch's checkpoint packs the tensors among its positional arguments only. Those in keywords and inside lists, dicts
    or dataclasses would be caught by a closure and never leave, so they are passed by position and put back inside. The
    frame of the checkpoint holds ``call`` until backward: it must not hold the tensors.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.framework_keywords = {name: kwargs[name] for name in kwargs if name in _FRAMEWORK_KEYWORDS}
        own = {name: value for name, value in kwargs.items() if name not in _FRAMEWORK_KEYWORDS}
        given = tuple(args), own
        self.call = _Reassembled(function, given, tree_map(self._take, given))

    def _take(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self.tensors.append(leaf)
        return _Place(len(self.tensors) - 1)


class _Reassembled:
    """The function, called with the tensors put back where they were.

    Forward gets the caller's own objects: a list that the function fills is read by the caller afterwards. A replay gets
    them as they were when forward began.
    """

    def __init__(self, function: Callable[..., Any], given: Any, tree: Any) -> None:
        self._function = function
        self._given = given
        self._tree = tree

    def __call__(self, *tensors: torch.Tensor) -> Any:
        given, self._given = self._given, None
        if given is not None:
            args, kwargs = given
            del given
            return self._function(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf, self._tree)
        return self._function(*args, **kwargs)


class _Place:
    """Stands for a tensor in a tree."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


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
