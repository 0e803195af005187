"""What a recomputed region reads beside its inputs, so that a replay of the user's Python reads the same.

Torch's own checkpoint takes for granted that modules, random sources and objects are in backward what they were in forward.
Where they are not, it computes other values and says nothing. Here, for one call of a region:

1. **Weights and buffers by place.** The tensors that a module holds when forward begins are the ones that the replay gets,
   also after ``functional_call`` has put the module's own back. Tensors whose place is managed by others (sharded,
   flattened, subclasses) are left alone.
2. **Buffers that forward writes** (batch norm's statistics, spectral norm's vectors, observers) are copied when forward
   begins. The replay works on a copy of that copy, so that buffers change once. Copies that forward did not need are freed
   when it ends, unless they are small. Buffers over ``COPIED_BYTES`` are not copied; rule 3 holds for them.
3. **Anything else that was changed in place** shows in its version. The replay then runs under a mode that raises at the first
   op that reads the changed tensor. A replay that does not read it is right, and goes on. What an op saves for backward is
   looked at as well: a replay may end when it has the last saved value, before the op that saved it runs.
4. **What the replay saves and then changes in place**: torch hands it to backward without a look at its version, where the
   plain step raises. The versions are looked at when the replay ends; not where a gradient is taken inside forward.
5. **Python state and random sources**: see :mod:`hyper_parallel.core.activation_checkpoint.python_state`.

In reach are the modules and objects that the function is, is bound to or closes over, and those among its arguments.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from hyper_parallel.backends.torch.ops import KNOWN, facts_of
from hyper_parallel.backends.torch.storages import tensors_in, unseen
from hyper_parallel.backends.torch.transformers_cache import is_cache
from hyper_parallel.core.activation_checkpoint.region_state import (
    SMALL_BYTES,
    GeneratorSource,
    Place,
    RegionStateBase,
    changed_in_place,
)
from hyper_parallel.errors import InPlaceChangeError

__all__ = ["RegionState"]

_PLAIN: Final = (torch.Tensor, nn.Parameter)
_MODULE_NAMES: Final = frozenset(vars(nn.Module()))
_ENGINES: Final = ("torch.distributed", "deepspeed", "fairscale", "accelerate")
"""Modules of these packages change their own attributes in a replay, and count on it."""


class _Seen:
    """A tensor in reach that has no place to put a stand-in: watched, not held."""

    __slots__ = ("reference", "version", "what")

    def __init__(self, reference: weakref.ref[torch.Tensor], version: int, what: str) -> None:
        self.reference = reference
        self.version = version
        self.what = what


class RegionState(RegionStateBase):
    """The state of one call of a region."""

    def __init__(self, where: str, function: Any, arguments: Iterable[Any], *, keeps_random_state: bool = True) -> None:
        super().__init__(where, function, arguments, keeps_random_state=keeps_random_state)
        self._seen: list[_Seen] = []
        self._arguments: list[weakref.ref[torch.Tensor]] = []
        self.is_forward_over = False

    def watch_arguments(self, tensors: Iterable[weakref.ref[torch.Tensor]]) -> None:
        """Raise where a replay reads one of these that was changed after the region.

        Torch checks what a region is given, except under saved-tensor hooks of others. Such hooks may hand out the tensor itself.
        """
        self._arguments.extend(tensors)

    # ------------------------------------------------------------------ what torch's modules and tensors are

    module_class = nn.Module
    tensor_class = torch.Tensor
    generator_class = torch.Generator
    generators = GeneratorSource(torch._C._DisableTorchDispatch, torch.equal)
    random_classes = (random.Random, np.random.Generator, np.random.RandomState)
    packages_left_alone = frozenset({"torch", "hyper_parallel"})
    packages_without_state = "torch.nn.modules."

    def _children(self, module: nn.Module) -> Iterable[Any]:
        return module._modules.values()

    def _tables(self, module: nn.Module) -> Iterable[dict[str, Any]]:
        return module._parameters, module._buffers

    def _framework_names(self) -> frozenset[str]:
        return _MODULE_NAMES

    def _has_place(self, value: Any) -> bool:
        return type(value) in _PLAIN and not value.is_inference()

    def _is_copied_first(self, place: Place) -> bool:
        tensor = place.tensor
        is_state = type(tensor) is torch.Tensor and place.names is not place.owner._parameters
        return is_state and tensor.layout is torch.strided and tensor.grad_fn is None

    def _take_tensor(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        if self._has_place(value):
            self._seen.append(_Seen(weakref.ref(value), value._version, "a tensor of an object among its arguments"))
        return True

    def _is_left_alone(self, value: Any) -> bool:
        return super()._is_left_alone(value) or is_cache(value)

    def _is_managed(self, tensor: Any) -> bool:
        """Whether a sharding engine exchanges it, or it is of a subclass with rules of its own."""
        if tensor is None or type(tensor) not in _PLAIN:
            return tensor is not None
        return type(tensor._base).__name__ == "FlatParameter"

    def _copied(self, tensor: Any, place: Place) -> Any:
        with torch.inference_mode(False), unseen():
            return tensor.clone()

    # ------------------------------------------------------------------ forward

    def __enter__(self) -> None:
        """Forward begins."""
        super().__enter__()
        self._python.remember_global_draws()

    def __exit__(self, *exc: object) -> None:
        """Forward has ended."""
        super().__exit__(*exc)
        self.is_forward_over = True
        for reference in self._arguments:
            tensor = reference()
            if tensor is not None and self._has_place(tensor):
                self._seen.append(_Seen(reference, tensor._version, "a tensor among its arguments"))
        self._arguments.clear()
        written = {id(place.owner) for place in self._places if place.is_written()}
        for place in self._places:
            if place.bytes_before is None or place.is_written() or id(place.owner) in written:
                continue
            if _hides_its_writes(place.owner) or place.bytes_before.nbytes <= SMALL_BYTES:
                continue
            place.bytes_before = None

    def _remember_module(self, module: nn.Module) -> None:
        if not type(module).__module__.startswith(_ENGINES):
            super()._remember_module(module)

    # ------------------------------------------------------------------ replay

    def watch(self) -> _Watching:
        """The innermost context of a replay: rule 3."""
        return _Watching(self)

    def changed(self) -> dict[int, str]:
        """What was changed in place since forward began and has no stand-in, by storage."""
        found: dict[int, str] = {}
        for place in self._places:
            if place.bytes_before is None and place.is_changed() and not self._is_managed(place.tensor):
                kind = "parameter" if place.names is place.owner._parameters else "buffer"
                found[place.tensor.untyped_storage()._cdata] = place.label(kind)
        for seen in self._seen:
            tensor = seen.reference()
            if tensor is not None and tensor._version != seen.version and tensor.layout is torch.strided:
                found[tensor.untyped_storage()._cdata] = f"{seen.what}, {tuple(tensor.shape)} {tensor.dtype}"
        return found


class _PerThread(threading.local):
    """What a thread has entered and not left: two backwards of one graph may replay a region at once."""

    def __init__(self) -> None:
        self.entered: list[Any] = []


class _Watching:
    def __init__(self, state: RegionState) -> None:
        self._state = state
        self._here = _PerThread()

    def __enter__(self) -> None:
        changed = self._state.changed()
        contexts = contextlib.ExitStack()
        if changed:
            contexts.enter_context(_Watch(self._state.where, changed))
        saves = _Saves(self._state.where, changed)
        contexts.callback(saves.check)
        contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(saves.pack, saves.unpack))
        self._here.entered.append((contexts, saves))

    def __exit__(self, *exc: Any) -> None:
        contexts, saves = self._here.entered.pop()
        # A gradient inside forward may have the replay run ahead, past a change that forward has not come to.
        saves.is_whole = self._state.is_forward_over and exc[0] in (None, _StopRecomputationError)
        contexts.__exit__(*exc)


class _Saves:
    """What autograd saves in one replay: between torch's hooks and the ops."""

    def __init__(self, where: str, changed: dict[int, str]) -> None:
        self._where = where
        self._changed = changed
        self._seen: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._pack, self.unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.is_whole = False  # the replay has ended as it should

    def pack(self, tensor: torch.Tensor) -> Any:
        """Give a tensor to torch's hook. Raises where backward would read one that was changed before the replay."""
        if self._changed:
            label = _label_of(tensor, self._changed)
            if label is not None:
                raise changed_in_place(self._where, label, "backward")
        if type(tensor) in _PLAIN and not tensor.is_inference():
            tensor = (
                tensor.detach()
            )  # torch keeps this very alias, which shares the counter, for as long as backward may ask for it
            self._seen.append((weakref.ref(tensor), tensor._version))
        return self._pack(tensor)

    def check(self) -> None:
        """The replay is over: rule 4."""
        for reference, version in self._seen if self.is_whole else ():
            tensor = reference()
            if tensor is not None and tensor._version != version:
                what = f"a saved tensor {tuple(tensor.shape)} {tensor.dtype}"
                raise InPlaceChangeError(
                    f"{self._where}: {what} was changed in place by the region after it was saved (saved at version {version}, "
                    f"now at version {tensor._version}). Backward would read other values than forward did. Replace the in-place "
                    "operation that follows the save by its out-of-place form (x = x + y), or clone the tensor first."
                )


def _label_of(tensor: torch.Tensor, changed: dict[int, str]) -> str | None:
    """How errors name the tensor, where it shares the bytes of a changed one."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return changed.get(tensor.untyped_storage()._cdata)
    return None


class _Watch(TorchDispatchMode):
    """Raises at the first op of a replay that reads a tensor which was changed since forward read it."""

    supports_higher_order_operators = True

    def __init__(self, where: str, changed: dict[int, str]) -> None:
        super().__init__()
        self._where = where
        self._changed = changed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo would otherwise skip every frame under a foreign mode."""
        return True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op, unless it reads a changed tensor."""
        facts = KNOWN.get(id(op)) or facts_of(op)
        if not facts.is_ignored and facts.replay_reason != "view":
            for tensor in tensors_in([*args, *(kwargs or {}).values()]):
                label = _label_of(tensor, self._changed)
                if label is not None:
                    raise changed_in_place(self._where, label, op)
        return op(*args, **(kwargs or {}))


def _hides_its_writes(module: nn.Module) -> bool:
    """Whether a module's ops write running values that no version counter shows."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None
