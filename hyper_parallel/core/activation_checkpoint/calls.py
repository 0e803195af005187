"""``checkpoint`` and ``swap``: one call of a region, from its arguments to its output. Written once for both frameworks.

A :class:`Calls` is the pair of functions for one framework. What only a framework has (its own checkpoint function and that
function's options) comes from its subclass in ``backends/<framework>/checkpointing.py``.

How the values that a region does not keep are made again in backward is a :class:`Recomputation`. There are two ways. The
framework's checkpoint runs the user's Python a second time, under contexts that give it the state and the kept values of
forward (:meth:`Calls.replay_contexts`). A recording of the ops runs only those that backward needs (:meth:`Calls.recorded`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import TensorAdapter
from hyper_parallel.core.activation_checkpoint.contexts import Nested
from hyper_parallel.core.activation_checkpoint.first_step import watch_first_step
from hyper_parallel.core.activation_checkpoint.flat_inputs import RegionCall
from hyper_parallel.core.activation_checkpoint.policy import TensorPolicy, as_op_policy
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.region_state import RegionStateBase
from hyper_parallel.core.activation_checkpoint.setting_checks import check_tensor_policy, label_of
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = [
    "Calls",
    "CheckpointCall",
    "ContextPair",
    "RecordedCall",
    "Recomputation",
    "is_in_replayed_region",
    "noop_context_fn",
]

ContextPair = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


def noop_context_fn() -> ContextPair:
    """A pair of contexts that do nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


@dataclasses.dataclass(kw_only=True, eq=False)
class CheckpointCall:
    """One call of :meth:`Calls.checkpoint`: the region, laid out flat, and what was asked for."""

    where: str
    region: RegionCall
    position: Position  # of every value of the region: they are wanted when the replay begins
    policy_fn: Any
    context_fn: Callable[[], ContextPair] | None
    early_stop: bool
    swap_config: SwapConfig | None
    swaps_inputs: bool
    keeps_random_state: bool
    options: dict[str, Any]  # of the framework's own checkpoint
    known: Any = None  # what the framework's adapter knows of this region from earlier calls
    watched: list[Any] = dataclasses.field(default_factory=list)  # weak references to the tensors among the arguments


@dataclasses.dataclass(kw_only=True, eq=False)
class RecordedCall:
    """One call of :meth:`Calls.checkpoint`, for a way to recompute that needs the function once."""

    where: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: Position
    policy: Any  # None, a function, or a PolicyTable
    swap_config: SwapConfig | None
    asked: dict[str, Any]  # what else the caller asked of this checkpoint by keyword


class Recomputation(Protocol):
    """A way to run a region so that backward can make again what the region does not keep."""

    def __call__(self) -> Any:
        """Run the region's forward; its output."""


class _ThisThread(threading.local):
    """How many regions this thread is in whose Python runs again in backward."""

    replayed_depth = 0


_THIS_THREAD = _ThisThread()


class _Replayed:
    """Around the forward and around each replay of a region whose Python runs again."""

    def __enter__(self) -> None:
        _THIS_THREAD.replayed_depth += 1

    def __exit__(self, *exc: object) -> None:
        _THIS_THREAD.replayed_depth -= 1


def is_in_replayed_region() -> bool:
    """Whether the Python that runs now belongs to a region that runs it again in backward."""
    return _THIS_THREAD.replayed_depth > 0


class Calls(abc.ABC):
    """``checkpoint`` and ``swap`` of one framework."""

    tensors: ClassVar[TensorAdapter]
    hooks: ClassVar[Callable[..., contextlib.AbstractContextManager[Any]]]  # the class AsyncSaveOnCpu
    state_class: ClassVar[type[RegionStateBase]]
    module_word: ClassVar[str]  # what the framework calls a module
    framework_keywords: ClassVar[frozenset[str]]  # of checkpoint(), which belong to the framework's own checkpoint

    # ------------------------------------------------------------------ what a framework alone has

    def packer_options(self, function: Any) -> dict[str, Any]:
        """What the packer of this framework must be told about the function that is run under its hooks."""
        return {}

    @abc.abstractmethod
    def take_random_state_option(self, options: dict[str, Any]) -> bool:
        """Whether a replay shall draw the same random numbers."""

    @abc.abstractmethod
    def run_replayable(self, call: CheckpointCall) -> Any:
        """The :class:`Recomputation` by the framework's own checkpoint, which runs the function again in backward."""

    @abc.abstractmethod
    def policy_pairs(self, call: CheckpointCall, state: Any) -> list[Any]:
        """The (forward, replay) pairs of contexts that serve the policy, outermost first.

        ``state`` is the region state (of ``state_class``) of the call; None where nothing is replayed.
        """

    def recorded(self, call: RecordedCall) -> Recomputation | None:
        """The :class:`Recomputation` by a recording of the ops; None where the function must run again in backward."""
        return None

    def prepared(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The function that is run in place of ``function`` for this call."""
        return function

    # ------------------------------------------------------------------ the two functions

    def checkpoint(
        self,
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
        where = self._where("checkpoint", function)
        options = {name: kwargs.pop(name) for name in self.framework_keywords & kwargs.keys()}
        if policy_fn is not None or swap_inputs:
            self.tensors.refuse_capture(where)
        position = Position(self.tensors.next_sequence())
        policy = (
            None if policy_fn is None else as_op_policy(policy_fn, where=where, check_names=self.tensors.check_op_names)
        )
        run = self.recorded(
            RecordedCall(
                where=where,
                function=function,
                args=args,
                kwargs=kwargs,
                position=position,
                policy=policy,
                swap_config=swap_config,
                asked={"context_fn": context_fn, **options},
            )
        )
        if run is None:
            keeps_random_state = self.take_random_state_option(options)
            prepared = self.prepared(function, args, kwargs)
            call = CheckpointCall(
                where=where,
                region=RegionCall(where, prepared, args, kwargs, is_tensor=self.tensors.is_tensor, is_flat=swap_inputs),
                position=position,
                policy_fn=policy,
                context_fn=context_fn,
                early_stop=early_stop,
                swap_config=swap_config,
                swaps_inputs=swap_inputs,
                keeps_random_state=keeps_random_state,
                options=options,
            )
            run = functools.partial(self.run_replayable, call)
            del prepared
        input_bytes = self._first_input_bytes(args, kwargs) if swap_inputs else 0
        del args, kwargs  # what runs the region holds its arguments
        if not swap_inputs:
            return watch_first_step(run(), self.tensors, is_recomputed=True)
        with self.hooks(swap_config=swap_config, where=f"inputs of {where}", position=position):
            output = run()
        position.sequence = self.tensors.next_sequence()
        SwapManager().trim_windows()
        return watch_first_step(output, self.tensors, is_recomputed=True, swapped_inputs=input_bytes)

    def swap(
        self,
        function: Callable[..., Any],
        *args: Any,
        policy_fn: TensorPolicy | None = None,
        swap_config: SwapConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """See ``hyper_parallel.swap``."""
        where = self._where("swap", function)
        check_tensor_policy(where, policy_fn)
        with self.hooks(policy_fn, swap_config=swap_config, where=where, **self.packer_options(function)):
            output = function(*args, **kwargs)
        return watch_first_step(output, self.tensors, is_recomputed=False)

    # ------------------------------------------------------------------ shared parts

    def _first_input_bytes(self, args: Any, kwargs: dict[str, Any]) -> int:
        """The bytes of a region's inputs, for the line about the first step; 0 once that is over."""
        if SwapManager().first_step.is_over:
            return 0
        return self.tensors.bytes_of((args, tuple(kwargs.values())))

    def label_of(self, function: Any) -> str:
        """The function or module as errors name it."""
        return label_of(function, self.tensors)

    def _where(self, name: str, function: Any) -> str:
        if not callable(function):
            raise TypeError(f"{name}: expected a {self.module_word} or a callable, got {function!r}")
        return f"{name} of {self.label_of(function)}"

    def replay_contexts(self, call: CheckpointCall) -> tuple[Nested, Nested]:
        """The contexts of one call, for the framework's checkpoint: around forward, and around each replay."""
        pairs: list[Any] = [] if call.context_fn is None else [call.context_fn()]
        state = None
        if self.tensors.is_recording():  # else nothing is replayed
            region = call.region
            state = self.state_class(
                call.where, region.region, region.take_objects(), keeps_random_state=call.keeps_random_state
            )
            pairs.append((state, state.replay()))
        pairs += self.policy_pairs(call, state)
        pairs.append((_Replayed(), _Replayed()))
        return Nested(*(pair[0] for pair in pairs)), Nested(*(pair[1] for pair in pairs))
