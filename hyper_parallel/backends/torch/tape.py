"""Recompute from a recording: a region's ops are recorded while forward runs, and backward runs only those that it needs.

The user's Python runs once. The recorder and the runner are native (``native``); this module decides whether a region may use
them and remembers, for every region, what was proven.

Rules
-----
1. A tape is used after it made the region's values again once, bit by bit, at the end of the forward that recorded it. Op
   sequences that were proven are not proven again, unless ``SwapConfig(verify=True)`` asks for it.
2. Where recording stops (an op that may not run again and writes, a tensor subclass), the values of this call stay. Later calls
   of the region run Python again, and the reason is counted.
3. A region that would hold much more than a checkpoint does, because what made its values is not run again (fused kernels, ops of
   other libraries), runs Python again from its next call on; so do modules that are built alike.
4. A tensor from outside the region is held through the saved-tensor hooks around the region, so that an outer region or an
   outer swap decides about it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hyper_parallel.backends.torch import native
from hyper_parallel.backends.torch.region_identity import RegionTable, owner_of
from hyper_parallel.backends.torch.storages import bytes_of, tensors_in
from hyper_parallel.backends.torch.tape_policies import ObservedReplays, SwappedOutputs, fates_for
from hyper_parallel.config import show_bytes
from hyper_parallel.core.activation_checkpoint.calls import RecordedCall, is_in_replayed_region
from hyper_parallel.core.activation_checkpoint.policy import ByOpName, PolicyTable
from hyper_parallel.core.activation_checkpoint.region_state import changed_in_place
from hyper_parallel.core.activation_checkpoint.statistics import INSIDE_REPLAYED_REGION
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["TapeRegion", "region_or_reason", "runs_from_tape"]

_COPIED_BEFORE_WRITE_BYTES: Final = 2**20
_STEERING_OUTPUT_BYTES: Final = 2**20

_STUCK_BYTES: Final = 2**20
_STUCK_SHARE: Final = 0.02  # of a region's inputs, which a checkpoint holds anyway
_SMALL_BUFFER_BYTES: Final = 2**16
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_NO_HOOKS: Final = (None, None)
_SERVED: Final = frozenset({"preserve_rng_state", "respect_saved_tensors_hooks"})
"""Options of a checkpoint that a tape serves: its replays always draw the same numbers, and hooks around it see what is held."""

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class TapeRegion:
    """What is known of one region over all its calls."""

    def __init__(self, recorder: Any, owner: Any) -> None:
        self._recorder = recorder
        self._history = recorder.RegionHistory()
        self._module = weakref.ref(owner) if isinstance(owner, torch.nn.Module) and _small_buffers(owner) else None
        self._built = _Built.of(owner)
        self.reason = _why_not_this_module(owner) or self._built.reason()  # why calls run Python again

    def run(
        self,
        where: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: PolicyTable | None = None,
        swaps: SwappedOutputs | ObservedReplays | None = None,
        *,
        proves_again: bool = False,
    ) -> Any:
        """Call the function once, recorded. With a policy come :class:`SwappedOutputs`.

        ``proves_again``: prove the tape also where an earlier call has proven this sequence of ops.
        """
        recorder = self._recorder
        history = recorder.RegionHistory() if proves_again else self._history
        _HIGHER_ORDER_OPS.pass_over_recorder(recorder)
        fates = None if policy is None else fates_for(policy)
        tape = recorder.Tape(where, history, _COPIED_BEFORE_WRITE_BYTES, _STEERING_OUTPUT_BYTES, fates, swaps)
        outer = _top_hooks(True)
        if outer is not None:
            tape.show_arguments(tensors_in((args, kwargs)), *outer)
        _push_hooks(tape.pack_hook(), recorder.unpack)
        try:
            tape.open()
            try:
                output = function(*args, **kwargs)
            finally:
                recorder.leave()
        except BaseException:
            tape.abandon()
            raise
        finally:
            _pop_hooks()
        manager = SwapManager()
        if not manager.first_step.is_over:
            manager.first_step.memory.add_region(tape.handed_bytes(tensors_in((output,))))
        tape.close()
        if swaps is not None:
            swaps.close()
        reason: str = tape.reason
        if not reason:
            if not tape.is_proven:
                reason = tape.prove()
            stuck_bytes = 0 if reason else tape.stuck_bytes
            if stuck_bytes > _STUCK_BYTES:
                self._give_up_if_large(stuck_bytes, tensors_in((args, kwargs)))
        if self._module is not None:
            tape.copy_held(_small_buffers(self._module()))
        tape.show_held(*(_NO_HOOKS if outer is None else outer))
        if isinstance(swaps, SwappedOutputs) and not reason:
            swaps.set_order(tape.given_in_order())
        counters = manager.counters
        if reason:
            self.reason = reason
        counters.count_recorded(owner_of(function), reason, tape.recomputed_bytes, tape.saved_bytes)
        return output

    def _give_up_if_large(self, stuck_bytes: int, inputs: list[torch.Tensor]) -> None:
        """Rule 3. This call is right, and larger than it should be; the next ones run Python again."""
        if stuck_bytes > _STUCK_SHARE * sum(map(bytes_of, inputs)):
            held = show_bytes(stuck_bytes)
            self.reason = f"ops that are not run again (fused kernels, other libraries) would hold {held} of a call"
            self._built.remember(self.reason)


class _Built:
    """What modules that are built alike have in common: their class, their parts and the shapes of their weights."""

    _reasons: ClassVar[weakref.WeakKeyDictionary[type, dict[int, str]]] = weakref.WeakKeyDictionary()

    def __init__(self, kind: type | None, parts: int) -> None:
        self._kind = kind
        self._parts = parts

    @classmethod
    def of(cls, owner: Any) -> _Built:
        """Of a module; a function, and a module that has no weights yet, are built like no other."""
        if not isinstance(owner, torch.nn.Module) or _is_lazy(owner):
            return cls(None, 0)
        modules = tuple(type(module).__qualname__ for module in owner.modules())
        shapes = tuple(tuple(parameter.shape) for parameter in owner.parameters())
        return cls(type(owner), hash((modules, shapes)))

    def reason(self) -> str | None:
        """Why regions of such modules run Python again."""
        return None if self._kind is None else self._reasons.get(self._kind, {}).get(self._parts)

    def remember(self, reason: str) -> None:
        """One of them would hold too much."""
        if self._kind is not None:
            self._reasons.setdefault(self._kind, {})[self._parts] = reason


class _HigherOrderOps:
    """Torch's higher-order ops (``flex_attention``, ``cond``): Python functions with a dispatch of their own.

    They know no kernel for the recorder's key, so they are told to pass over it. The ops that they run are recorded.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def pass_over_recorder(self, recorder: Any) -> None:
        """Tell the ops that were registered since the last call."""
        registered = torch._ops._higher_order_ops
        if len(registered) == len(self._known):
            return
        for name, op in list(registered.items()):
            if name not in self._known:
                self._known.add(name)
                keys = op.non_fallthrough_keys
                op.non_fallthrough_keys = keys.from_raw_repr(recorder.without_recorder(keys.raw_repr()))

    def names(self) -> frozenset[str]:
        """Their names."""
        return frozenset(torch._ops._higher_order_ops)


_HIGHER_ORDER_OPS = _HigherOrderOps()

_REGIONS: RegionTable[TapeRegion] = RegionTable()


def region_for(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TapeRegion:
    """The region that this call runs. Raises ``TypeError`` where the function has no identity."""
    if isinstance(function, torch.nn.Module):
        known = _REGIONS.of_module(function)
        if known is not None:
            return known

    def new() -> TapeRegion:
        recorder = native.load()
        assert recorder is not None, "it was asked for before"
        recorder.set_changed_error(_changed_error)
        return TapeRegion(recorder, owner_of(function))

    # A lazy module gets its parameters in its first forward.
    return _REGIONS.find(function, args, kwargs, new, is_stored=lambda owner: not _is_lazy(owner))


def runs_from_tape(module: torch.nn.Module) -> bool:
    """Whether the last call of this module as a recomputed region was recorded."""
    region = _REGIONS.of_module(module)
    return region is not None and region.reason is None


def region_or_reason(call: RecordedCall) -> TapeRegion | str:
    """The region that records this call, or why the call runs Python again in backward."""
    reason = _why_no_tape(call.policy, call.asked)
    if reason is not None:
        return reason
    try:
        region = region_for(call.function, call.args, call.kwargs)
    except TypeError:  # neither it nor its code can be referred to weakly
        return "a callable without an identity"
    return region.reason or region


def _why_no_tape(policy: Any, asked: dict[str, Any]) -> str | None:  # noqa: C901  # a list
    if native.load() is None:
        return f"no native recorder: {native.why_not()}"
    if policy is not None and not isinstance(policy, PolicyTable):
        return "a policy that is a function of an op's arguments"
    if isinstance(policy, ByOpName) and not _HIGHER_ORDER_OPS.names().isdisjoint(policy.table):
        return "a policy that names a higher-order op"
    for name, value in asked.items():
        if value and name not in _SERVED:
            return f"the option {name}"
    if is_in_replayed_region() or _is_in_torchs_checkpoint():
        return INSIDE_REPLAYED_REGION
    if torch.is_inference_mode_enabled():
        return "inference mode"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform (torch.func)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "the capture of a CUDA graph"
    for mode in _get_current_dispatch_mode_stack():
        if not type(mode).__module__.startswith("hyper_parallel."):
            return f"the dispatch mode {type(mode).__name__}"
    return None


def _is_in_torchs_checkpoint() -> bool:
    """Whether torch's own checkpoint is the next scope around, in its forward or in its replay.

    It counts what is saved in both. A tape saves more than a checkpoint does, so both runs must take the same way.
    """
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _small_buffers(module: torch.nn.Module | None) -> list[torch.Tensor]:
    """Buffers that others may change between a forward and its backward (statistics, counters)."""
    if module is None:
        return []
    return [
        buffer for buffer in module.buffers() if buffer.nbytes <= _SMALL_BUFFER_BYTES and type(buffer) is torch.Tensor
    ]


def _changed_error(where: str, what: str, storage: int, version: int, now: int) -> InPlaceChangeError:
    """The error of a value that is not what forward read (``storage`` names a tensor from outside) or saved (0)."""
    if storage:
        return changed_in_place(where, f"{_name_of(storage)} {what}", "a recorded op")
    return InPlaceChangeError(
        f"{where}: a saved tensor {what} was changed in place after it was saved (saved at version {version}, now at version "
        f"{now}). Backward would read other values than forward did. Replace the in-place operation that follows the save by "
        "its out-of-place form (x = x + y), or clone the tensor first."
    )


def _name_of(storage: int) -> str:
    """The tensor over this storage, as the regions' modules name it."""
    for region in _REGIONS.modules():
        for module in region.modules():
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if (
                        isinstance(tensor, torch.Tensor)
                        and type(tensor) in _PLAIN
                        and tensor.untyped_storage()._cdata == storage
                    ):
                        return f"the {kind} '{name}' of {type(module).__name__}"
    return "a tensor from outside the region"


def _is_lazy(owner: Any) -> bool:
    return isinstance(owner, torch.nn.Module) and any(map(is_lazy, (*owner.parameters(), *owner.buffers())))


def _why_not_this_module(owner: Any) -> str | None:
    if not isinstance(owner, torch.nn.Module):
        return None
    for module in owner.modules():
        if hasattr(module, "_get_fsdp_state"):
            return "a module that FSDP2 manages"
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return "a compiled module"
    for tensor in (*owner.parameters(), *owner.buffers()):
        if type(tensor) not in _PLAIN:
            return f"a parameter of type {type(tensor).__name__}"
    return None
