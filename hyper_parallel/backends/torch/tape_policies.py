"""Policies on a tape: what a :class:`PolicyTable` answers, for the native recorder, and the outputs that it swaps.

The recorder asks once for each op and remembers (``Fates`` in ``native/fates.h``). A saved output stays in the tape. A swapped
one goes through :class:`SwappedOutputs`, which is all that a tape knows of the swap engine.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.ops import facts_of, is_weight_cast
from hyper_parallel.backends.torch.region_identity import owner_of
from hyper_parallel.backends.torch.saved_tensors import TorchPacker
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.packed import SwappedValue
from hyper_parallel.core.activation_checkpoint.policy import Answers, ByOpName, PolicyTable, fate_of_op
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.fates import Fate

__all__ = ["ObservedReplays", "SwappedOutputs", "fates_for"]

_NUMBERS: Final = {Fate.RECOMPUTE: 0, Fate.SAVE: 1, Fate.SWAP: 2}  # as in native/fates.h
_RECOMPUTED: Final = (0, None)

_NumberedAnswers = int | list[int] | Callable[[], int]


def fates_for(policy: PolicyTable) -> Any:  # native Fates
    """The answers of a policy as the recorder reads them; the same object for the same policy."""
    if isinstance(policy, ByOpName):
        return _fates_by_name(policy)
    known = _FATES.get(policy)
    if known is None:
        known = _FATES[policy] = _new_fates(weakref.ref(policy))
    return known


_FATES: weakref.WeakKeyDictionary[PolicyTable, Any] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=64)
def _fates_by_name(policy: ByOpName) -> Any:
    return _new_fates(lambda: policy)


def _new_fates(policy: Callable[[], PolicyTable | None]) -> Any:
    """``policy`` is a weak reference, because the native object is invisible to the garbage collector."""
    recorder = native.load()
    assert recorder is not None, "it was asked for before"
    return recorder.Fates(functools.partial(_resolve, policy))


def _resolve(
    policy: Callable[[], PolicyTable | None], name: str, overload: str
) -> tuple[_NumberedAnswers, Callable[[Any], bool] | None]:
    """The answers for one op, as numbers, and which instances of it are not the policy's."""
    space, _, base = name.partition("::")
    op = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
    facts = facts_of(op)
    if facts.is_ignored or facts.replay_reason is not None:
        return _RECOMPUTED
    table = policy()
    assert table is not None, "a region that runs has its policy"
    passes_over = _is_weight_cast if facts.may_be_weight_cast else None
    return _numbered(table.answers_for(op), policy, op), passes_over


def _numbered(answers: Answers, policy: Callable[[], PolicyTable | None], op: Any) -> _NumberedAnswers:
    if isinstance(answers, Mapping):
        last = max(answers, default=-1)
        return [_number(answers[at], op) if at in answers else 0 for at in range(last + 1)]
    if callable(answers):
        return functools.partial(_ask, policy, op)
    return _number(answers, op)


def _ask(policy: Callable[[], PolicyTable | None], op: Any) -> int:
    table = policy()
    assert table is not None, "a region that runs has its policy"
    answers = table.answers_for(op)
    assert callable(answers), "a policy answers in one way for an op"
    return _number(answers(), op)


def _number(answer: Any, op: Any) -> int:
    return _NUMBERS[fate_of_op(answer, op, where="checkpoint")]


def _is_weight_cast(source: torch.Tensor) -> bool:
    return is_weight_cast((source,))


class ObservedReplays:
    """Tells the observer of a step when a tape's replays begin and end. Only regions that run while a step is observed have one.

    A tape of a region without a policy calls ``begin`` and ``end`` of this class as it calls those of :class:`SwappedOutputs`.
    """

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ObservedReplays | None:
        """For one call of this function; None where no step is observed."""
        observer = SwapManager().counters.on_replay
        return None if observer is None else cls(function, observer)

    def __init__(self, function: Callable[..., Any], observer: Callable[[Any, bool], None]) -> None:
        owner = owner_of(function)
        # The tape is invisible to the garbage collector, and a module may hold its own output.
        self._owner = weakref.ref(owner) if isinstance(owner, torch.nn.Module) else lambda: owner
        self._observer = observer

    def begin(self) -> None:
        """A replay begins."""
        self._observer(self._owner(), True)

    def end(self) -> None:
        """A replay ended, with or without an error."""
        self._observer(self._owner(), False)

    def close(self) -> None:
        """Forward is over. Nothing to do: no value goes through this class."""


class SwappedOutputs:
    """The swapped outputs of one region. The methods are called by its tape, under the tape's lock."""

    def __init__(
        self, where: str, config: SwapConfig | None, position: Position, observed: ObservedReplays | None = None
    ) -> None:
        self._observed = observed
        self._packer = TorchPacker(config=config, where=where, position=position)
        self._position = position
        self._engines: set[Engine] = set()
        self._used: list[SwappedValue] = []
        self._index = 0
        self._is_in_replay = False

    def swap(self, tensor: torch.Tensor) -> SwappedValue | None:
        """Give an op's output to the engine; None where it stays, with the reason counted."""
        self._index += 1
        swapped = self._packer.swap_output(tensor, self._index)
        if swapped is not None:
            self._engines.add(swapped.record.engine)
        return swapped

    def fetch(self, swapped: SwappedValue) -> torch.Tensor:
        """The value, on the device and ordered for the current stream. The tape has looked whether it was changed."""
        value: torch.Tensor = swapped.unpack_value(checks_version=False)
        self._used.append(swapped)
        if not self._is_in_replay:
            self._drop_used()
        return value

    def before_write(self, swapped: SwappedValue) -> bool:
        """An op is about to change the source: order it after the copy out. False when there is no copy."""
        record = swapped.record
        return record.engine.finish_copy_before_write(record)

    def is_exact(self, swapped: SwappedValue) -> bool:
        """Whether the far copy holds the value although its source was changed since."""
        return swapped.record.snapshot_is_exact

    def begin(self) -> None:
        """A replay begins: start the loads."""
        self._is_in_replay = True
        task = TENSORS.current_task(self._position)
        if task is not None:
            SwapManager().start_prefetch(task, self._engines)
        if self._observed is not None:
            self._observed.begin()

    def end(self) -> None:
        """A replay ended. The tape holds what is still needed; the engine's own reference would keep all of it."""
        self._is_in_replay = False
        self._drop_used()
        if self._observed is not None:
            self._observed.end()

    def close(self) -> None:
        """Forward is over: from here the region's values are wanted when backward reaches its last node."""
        self._position.sequence = TENSORS.next_sequence()
        self._packer.flush()

    def set_order(self, given: Sequence[Any]) -> None:
        """The order in which backward will ask for the region's values and inputs. What it does not ask for comes after them."""
        for index, value in enumerate(given, start=-len(given)):
            if isinstance(value, SwappedValue) and value.record.position is self._position:
                value.record.index = index

    def _drop_used(self) -> None:
        used, self._used = self._used, []
        for swapped in used:
            swapped.record.engine.drop_after_replay(swapped.record)
