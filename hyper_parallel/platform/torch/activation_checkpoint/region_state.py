"""What a recomputed region reads beside its inputs, so that a replay of the user's Python reads the same.

Torch's own checkpoint takes for granted that modules, random sources and objects are in backward what they were in forward.
Where they are not, it computes other values and says nothing. Here, for one call of a region:

1. **Weights and buffers by place.** The tensors that a module holds when forward begins are the ones that the replay gets,
   also after ``functional_call`` has put the module's own back. Tensors whose place is managed by others (sharded,
   flattened, subclasses) are left alone.
2. **Buffers that forward writes** (batch norm's statistics, spectral norm's vectors, observers) are copied when forward
   begins. The replay works on a copy of that copy, so that buffers change once. Buffers over ``COPIED_BYTES`` are not
   copied; rule 3 holds for them.
3. **Anything else that was changed in place** shows in its version. The replay then runs under a mode that raises at the first
   op that reads the changed tensor. A replay that does not read it is right, and goes on.
4. **Python state and random sources**: see :mod:`hyper_parallel.core.activation_checkpoint.python_state`.

In reach are the modules and objects that the function is, is bound to or closes over, and those among its arguments.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.activation_checkpoint.python_state import PythonState
from hyper_parallel.errors import InPlaceChangeError
from hyper_parallel.platform.base.flat_inputs import Reassembled
from hyper_parallel.platform.torch.activation_checkpoint.ops import KNOWN, facts_of
from hyper_parallel.platform.torch.activation_checkpoint.storages import tensors_in, unseen
from hyper_parallel.platform.torch.activation_checkpoint.transformers_cache import is_cache

__all__ = ["RegionState"]

COPIED_BYTES: Final = 16 << 20  # of buffers, per call of a region; freed when forward ends unless forward wrote them
_SMALL_BYTES: Final = 64 << 10  # a buffer of this size stays copied: it costs nothing, and a change of it does no harm

_PLAIN: Final = (torch.Tensor, nn.Parameter)
_MODULE_NAMES: Final = frozenset(vars(nn.Module()))
_ENGINES: Final = ("torch.distributed", "deepspeed", "fairscale", "accelerate")
"""Modules of these packages change their own attributes in a replay, and count on it."""

_RANDOM_SOURCES: Final = (random.Random, np.random.Generator, np.random.RandomState)
_NOTED_KINDS: Final = frozenset(
    {torch.Tensor, types.FunctionType, list, dict, set, collections.deque, torch.Generator, *_RANDOM_SOURCES}
)
_LEFT_ALONE: Final = frozenset(
    {"torch", "hyper_parallel"}
)  # objects of these packages have no state that forward reads


class _TorchGenerator:
    """``torch.Generator``."""

    def read(self, source: torch.Generator) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return source.get_state()

    def write(self, source: torch.Generator, state: torch.Tensor) -> None:
        with torch._C._DisableTorchDispatch():
            source.set_state(state)

    def is_same(self, one: torch.Tensor, two: torch.Tensor) -> bool:
        with torch._C._DisableTorchDispatch():
            return torch.equal(one, two)


_TORCH_GENERATOR: Final = _TorchGenerator()


class _Place:
    """One tensor of a module: where it is, which one it was, and its bytes where forward writes them."""

    __slots__ = ("bytes_before", "key", "names", "owner", "tensor", "version")

    def __init__(self, owner: nn.Module, names: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.names = names
        self.key = key
        self.tensor = tensor
        self.version = tensor._version
        self.bytes_before: torch.Tensor | None = None

    def is_written(self) -> bool:
        return self.tensor._version != self.version or self.names.get(self.key) is not self.tensor

    def copy_bytes(self) -> None:
        with torch.inference_mode(False), unseen():
            self.bytes_before = self.tensor.clone()

    def stand_in(self) -> torch.Tensor:
        """What the replay finds here."""
        if self.bytes_before is None:
            return self.tensor
        with torch.inference_mode(False), unseen():
            return self.bytes_before.clone()

    def label(self) -> str:
        kind = "parameter" if self.names is self.owner._parameters else "buffer"
        return f"the {kind} {self.key!r} of {type(self.owner).__name__}, {tuple(self.tensor.shape)} {self.tensor.dtype}"


class _Seen:
    """A tensor in reach that has no place to put a stand-in: watched, not held."""

    __slots__ = ("reference", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self.version = tensor._version


class RegionState:
    """The state of one call of a region."""

    def __init__(self, where: str, function: Any, arguments: Iterable[Any], *, keeps_random_state: bool = True) -> None:
        self.where = where
        self._roots = [*_objects_in(function), *arguments]
        self._keeps_random_state = keeps_random_state
        self._python = PythonState()
        self._modules: dict[int, nn.Module] = {}
        self._flags: list[tuple[nn.Module, bool]] = []  # whether each module trained
        self._places: list[_Place] = []
        self._seen: list[_Seen] = []

    # ------------------------------------------------------------------ forward

    def __enter__(self) -> None:
        """Forward begins."""
        roots, self._roots = self._roots, []
        self._python.note(roots, is_foreign=self._is_foreign)
        noted = 0
        while noted < len(self._modules):  # a function that a module holds may close over another one
            for module in tuple(self._modules.values())[noted:]:
                noted += 1
                self._note_module(module)
        self._copy_buffers()
        if self._keeps_random_state:
            self._python.note_global_draws()

    def __exit__(self, *exc: object) -> None:
        """Forward has ended."""
        self._python.keep_changes()
        self._modules = {}
        written = {id(place.owner) for place in self._places if place.is_written()}
        for place in self._places:
            if place.bytes_before is None or place.is_written() or id(place.owner) in written:
                continue
            if _hides_its_writes(place.owner) or place.bytes_before.nbytes <= _SMALL_BYTES:
                continue
            place.bytes_before = None

    def _is_foreign(self, value: Any) -> bool:
        """Take over what the Python state must not look into."""
        if isinstance(value, torch.Tensor):
            if type(value) in _PLAIN and not value.is_inference():
                self._seen.append(_Seen(value))
            return True
        if isinstance(value, nn.Module):
            self._take_modules(value)
            return True
        if isinstance(value, torch.Generator):
            if self._keeps_random_state:
                self._python.note_source(value, _TORCH_GENERATOR)
            return True
        return type(value).__module__.split(".")[0] in _LEFT_ALONE or is_cache(value)

    def _take_modules(self, root: nn.Module) -> None:
        stack = [root]
        while stack:
            module = stack.pop()
            if id(module) not in self._modules:
                self._modules[id(module)] = module
                stack.extend(child for child in module._modules.values() if child is not None)

    def _note_module(self, module: nn.Module) -> None:
        package = type(module).__module__
        if package.startswith(_ENGINES):
            return
        self._flags.append((module, module.training))
        if not package.startswith("torch.nn.modules."):  # whose classes write no attribute in forward
            self._note_attributes(module)
        for places in (module._parameters, module._buffers):
            if places:
                for key, value in places.items():
                    if value is not None and type(value) in _PLAIN:
                        self._note_place(module, places, key, value)

    def _note_attributes(self, module: nn.Module) -> None:
        names = module.__dict__
        self._python.note_names(names)
        for key, value in names.items():
            kind = type(value)
            if kind not in _NOTED_KINDS or key in _MODULE_NAMES:
                continue
            if kind is torch.Tensor:
                self._note_place(module, names, key, value)
            elif kind is types.FunctionType:
                self._python.note(_objects_in(value), is_foreign=self._is_foreign)
            elif kind is torch.Generator or kind in _RANDOM_SOURCES:
                self._python.note((value,), is_foreign=self._is_foreign)
            else:
                self._python.note_items(value)

    def _note_place(self, module: nn.Module, names: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
        if not tensor.is_inference():
            self._places.append(_Place(module, names, key, tensor))

    def _copy_buffers(self) -> None:
        left = COPIED_BYTES
        for place in self._places:
            tensor = place.tensor
            is_state = type(tensor) is torch.Tensor and place.names is not place.owner._parameters
            if is_state and tensor.layout is torch.strided and 0 < tensor.nbytes <= left and tensor.grad_fn is None:
                left -= tensor.nbytes
                place.copy_bytes()

    # ------------------------------------------------------------------ replay

    def replay(self) -> _Replay:
        """The context of a replay: forward's state is in place while it runs."""
        return _Replay(self)

    def watch(self) -> _Watching:
        """The innermost context of a replay: rule 3."""
        return _Watching(self)

    def put_back(self) -> Callable[[], None]:
        """Put forward's state in place. The answer restores what is there now."""
        undo_python = self._python.put_back()
        switched = [(module, trained) for module, trained in self._flags if module.training is not trained]
        for module, trained in switched:
            module.training = trained
        displaced: list[tuple[dict[str, Any], str, Any]] = []
        for place in self._places:
            now = place.names.get(place.key)
            if not _is_managed(now) and not _is_managed(place.tensor):
                stand_in = place.stand_in()
                if stand_in is not now:
                    displaced.append((place.names, place.key, now))
                    place.names[place.key] = stand_in

        def undo() -> None:
            for names, key, now in reversed(displaced):
                names[key] = now
            for module, trained in switched:
                module.training = not trained
            undo_python()

        return undo

    def changed(self) -> dict[int, str]:
        """What was changed in place since forward began and has no stand-in, by storage."""
        found: dict[int, str] = {}
        for place in self._places:
            if place.bytes_before is None and place.tensor._version != place.version and not _is_managed(place.tensor):
                found[place.tensor.untyped_storage()._cdata] = place.label()
        for seen in self._seen:
            tensor = seen.reference()
            if tensor is not None and tensor._version != seen.version and tensor.layout is torch.strided:
                label = f"a tensor of an object among its arguments, {tuple(tensor.shape)} {tensor.dtype}"
                found[tensor.untyped_storage()._cdata] = label
        return found


class _PerThread(threading.local):
    """What a thread has entered and not left: two backwards of one graph may replay a region at once."""

    def __init__(self) -> None:
        self.entered: list[Any] = []


class _Replay:
    def __init__(self, state: RegionState) -> None:
        self._state = state
        self._here = _PerThread()

    def __enter__(self) -> None:
        self._here.entered.append(self._state.put_back())

    def __exit__(self, *exc: Any) -> None:
        self._here.entered.pop()()


class _Watching:
    def __init__(self, state: RegionState) -> None:
        self._state = state
        self._here = _PerThread()

    def __enter__(self) -> None:
        changed = self._state.changed()
        mode = _Watch(self._state.where, changed) if changed else contextlib.nullcontext()
        mode.__enter__()
        self._here.entered.append(mode)

    def __exit__(self, *exc: Any) -> None:
        self._here.entered.pop().__exit__(*exc)


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
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    label = self._changed.get(tensor.untyped_storage()._cdata)
                    if label is not None:
                        self._raise(label, op)
        return op(*args, **(kwargs or {}))

    def _raise(self, label: str, op: Any) -> None:
        raise InPlaceChangeError(
            f"{self._where}: cannot recompute, because {label}, which {op} reads, was changed in place after forward read it. "
            "Backward would use other values than forward did. Run backward before the change (an optimizer's step, a "
            "broadcast, an update of running values), or use hp.swap_wrapper here, which recomputes nothing."
        )


def _objects_in(function: Any) -> Iterator[Any]:
    """The modules and objects that a function can reach without a global name."""
    if isinstance(function, nn.Module):
        yield function
    elif isinstance(function, Reassembled):
        yield from _objects_in(function.function)
    elif isinstance(function, functools.partial):
        yield from _objects_in(function.func)
        yield from function.args
        yield from function.keywords.values()
    else:
        owner = getattr(function, "__self__", None)
        if owner is not None:
            yield owner
        is_ours = str(getattr(function, "__module__", "")).startswith("hyper_parallel.")
        for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if callable(value) and not isinstance(value, nn.Module):
                yield from _objects_in(value)
            elif not is_ours or isinstance(value, nn.Module):
                yield value


def _is_managed(value: Any) -> bool:
    """Whether somebody else exchanges this tensor: a sharding engine, or a subclass with rules of its own."""
    if value is None or type(value) not in _PLAIN:
        return value is not None
    return type(value._base).__name__ == "FlatParameter"


def _hides_its_writes(module: nn.Module) -> bool:
    """Whether a module's ops write running values that no version counter shows."""
    return isinstance(module, _NormBase) and module.training and module.running_mean is not None
