"""A wrapper around a compiled module: the module is compiled once more, with the region inside its graph.

``torch.compile(block)``, ``block.compile()`` and a compiled ``forward`` keep the settings of their compilation (backend, mode,
``fullgraph``, ``dynamic``). A function that runs the block as a region is compiled with the same settings, and is called in place
of the compiled block. Where dynamo runs it uncompiled (a dispatch mode, too many recompilations, ``set_stance``), the region runs
around the compiled block, as it does around any other module.

What the policy or ``swap_inputs`` swaps is saved by the graph. Hooks around the call collect all that the graph saves, in its
order. When the call returns, the number of the graph that ran is known, and with it which places are swapped.

Hooks on ``torch.compile(block)`` itself (``fully_shard`` puts its own there) run around the region, uncompiled, as torch runs
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.backends.torch.first_step import set_predicted
from hyper_parallel.backends.torch.graph_regions import GraphRegion, InGraph, run_in_graph, warn_of_saved_swaps
from hyper_parallel.backends.torch.saved_places import KeptOp, OpKey, end_watch, traced_graph
from hyper_parallel.backends.torch.saved_tensors import TorchPacker
from hyper_parallel.backends.torch.storages import tensors_in
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.core.activation_checkpoint.first_step import watch_first_step
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed
from hyper_parallel.core.activation_checkpoint.setting_checks import label_of
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import ActivationError, CompileWarning, HyperParallelError
from hyper_parallel.platform.torch import compat

__all__ = ["COMPILATIONS", "NOT_COMPILED", "Compilations", "call_compiled", "refuse_cuda_graphs"]

NOT_COMPILED: Final = object()
"""What :func:`call_compiled` answers where nothing was run."""

_NUMBERS = itertools.count()
_RUNNERS: weakref.WeakKeyDictionary[GraphRegion, dict[type, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_COMPILED: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def refuse_cuda_graphs(module: torch.nn.Module) -> None:
    """Refuse to swap what a CUDA graph saves: its next run writes to the same memory, also while a copy still reads it."""
    compiler = compat.compiler_of(module)
    if compiler is None or _MAY_SWAP.get(module) is compiler:
        return
    if compat.runs_cuda_graphs(module):
        raise ActivationError(
            f"{label_of(compat.uncompiled(module), TENSORS)}: cannot swap what this compiled block saves, because it runs as a "
            "CUDA graph (mode='reduce-overhead' or 'max-autotune', or the option triton.cudagraphs), which saves into memory "
            "that its next run overwrites. Compile it with mode='max-autotune-no-cudagraphs' or without a mode; or recompute "
            "only: checkpoint_wrapper(block) without swap_inputs and with a policy that saves."
        )
    _MAY_SWAP[module] = compiler


_MAY_SWAP: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # modules that were looked at


@dataclasses.dataclass
class Compilations:
    """How many graphs of regions were compiled in this process, and for how long."""

    count: int = 0
    seconds: float = 0.0


COMPILATIONS: Final = Compilations()


def call_compiled(in_graph: InGraph, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a compiled module with the region inside its graph; ``NOT_COMPILED`` where it is not compiled as a whole."""
    region = in_graph.region
    compiler = compat.compiler_of(module)
    if compiler is None or region is None:
        return NOT_COMPILED
    if in_graph.may_swap:
        refuse_cuda_graphs(module)
    call = _Call(region, module, _compiled(region, module, compiler))
    collected = None
    try:
        if not in_graph.may_swap:
            output = call.run(args, kwargs)
        else:
            collected = _Collected(in_graph, region)
            with saved_tensors_hooks(collected.collect, _unpack):
                output = call.run(args, kwargs)
    except _NotCompiledError:
        return NOT_COMPILED
    except Exception as error:
        inner = getattr(error, "inner_exception", None)  # torch.compile wraps what a policy raises while it traces
        if isinstance(inner, HyperParallelError):
            raise inner from None
        raise
    finally:
        end_watch()
    if in_graph.predicted is not None:
        set_predicted(in_graph.predicted)
    if collected is not None:
        collected.pack(call.graph, (args, kwargs) if in_graph.swaps_inputs else ())
    return watch_first_step(output, TENSORS, is_recomputed=True)


class _NotCompiledError(Exception):
    """Dynamo did not compile the region, and nothing of the module has run."""


class _Call:
    """One call of a compiled region."""

    def __init__(self, region: GraphRegion, module: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        self._region = region
        self._module = module
        self._compiled = compiled
        self.graph: int | None = None  # the number of the graph that ran

    def run(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run it, with hooks of ``torch.compile(module)`` around."""
        inside = compat.uncompiled(self._module)
        if inside is self._module or not compat.has_own_hooks(self._module):
            return self._run_inside(*args, **kwargs)
        return compat.call_with_hooks(self._module, self._run_inside, args, kwargs)

    def _run_inside(self, *args: Any, **kwargs: Any) -> Any:
        inside, begin = compat.uncompiled(self._module), time.perf_counter()
        output, self.graph = self._compiled(self._region, inside, *args, **kwargs)
        if output is NOT_COMPILED:
            raise _NotCompiledError
        if self.graph is not None and self.graph not in _RAN:
            _RAN.add(self.graph)
            COMPILATIONS.count += 1
            COMPILATIONS.seconds += time.perf_counter() - begin
            _warn_of_missing_ops(self._region, self.graph)
        return output


_RAN: Final[set[int]] = set()  # the graphs that ran at least once


def _warn_of_missing_ops(region: GraphRegion, graph: int) -> None:
    """Say where a policy names single ops that the traced graph does not have: their fates cannot be kept."""
    traced = traced_graph(graph)
    find: Callable[[Any], list[str]] | None = getattr(region.policy, "missing_in", None)
    missing = [] if find is None or traced is None else find(traced.asked)
    if missing:
        some = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        warnings.warn(
            f"hyper_parallel: {region.where}: the graph that was traced now runs other ops than the profiled step, and has no "
            f"{some}. The outputs of these ops were to be kept; they are recomputed instead. Profile and plan again with the "
            "shapes and the code of now.",
            CompileWarning,
            stacklevel=2,
        )


def _compiled(region: GraphRegion, module: torch.nn.Module, compiler: Any) -> Callable[..., Any]:
    with _LOCK:
        known = _COMPILED.get(module)
        if known is not None and known[0] == (compiler, region):
            return known[1]
        runners = _RUNNERS.setdefault(region, {})
        kind = type(compat.uncompiled(module))
        if kind not in runners:
            runners[kind] = compat.own_code(_run)
        compiled: Callable[..., Any] = compiler(runners[kind])
        _COMPILED[module] = ((compiler, region), compiled)
        return compiled


@compat.constant_in_graph
def _new_number() -> int:
    return next(_NUMBERS)


def _run(region: GraphRegion, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
    """The function that is compiled: the output, and the number of the traced graph."""
    if not torch.compiler.is_dynamo_compiling():
        return NOT_COMPILED, None
    graph = _new_number()
    return run_in_graph(region, module, args, kwargs, graph), graph


class _Shown:
    """A value that the hooks around the call have packed."""

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self._packed = packed
        self._unpack = unpack

    def unpack(self) -> torch.Tensor:
        """The value."""
        return self._unpack(self._packed)


class _Saved:
    """What autograd holds for one value that a graph saves."""

    __slots__ = ("packed", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor  # until the call returns
        self.packed: Packed | _Shown | None = None

    def take(self) -> torch.Tensor:
        """The tensor, which is not held here any more."""
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "it is taken once"
        return tensor


def _unpack(saved: _Saved) -> torch.Tensor:
    assert saved.packed is not None, "a call that failed has no backward"
    value: torch.Tensor = saved.packed.unpack()
    return value


def _is_random_state(saved: _Saved) -> bool:
    tensor = saved.tensor
    return tensor is not None and tensor.dtype is torch.uint8 and tensor.dim() == 1


class _Collected:
    """All that one call of a compiled region saves, in order."""

    def __init__(self, in_graph: InGraph, region: GraphRegion) -> None:
        self._packer = TorchPacker(config=in_graph.swap_config, where=region.where)
        self._swapped: frozenset[OpKey] | None = in_graph.swapped
        self._saved: list[_Saved] = []
        # (pack, unpack) | None: they decide about what is not swapped here
        self._outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def collect(self, tensor: torch.Tensor) -> _Saved:
        """The pack hook."""
        saved = _Saved(tensor)
        self._saved.append(saved)
        return saved

    def pack(self, graph: int | None, inputs: Any) -> None:
        """Swap what is marked and the region's inputs; keep the rest."""
        places = self._places(graph)
        keys = {TENSORS.storage_key_if_any(tensor) for tensor in tensors_in(inputs)}
        for saved, kept in zip(self._saved, places, strict=True):
            tensor = saved.take()
            if self._is_swapped(kept) or TENSORS.storage_key_if_any(tensor) in keys:
                saved.packed = self._packer.pack(tensor)
            elif self._outer is not None:
                pack, unpack = self._outer
                saved.packed = _Shown(pack(tensor), unpack)
            else:
                saved.packed = KeptValue.of(tensor, self._packer.scope)
        self._packer.flush()
        SwapManager().trim_windows()

    def _is_swapped(self, kept: KeptOp | None) -> bool:
        if kept is None:
            return False
        return kept.is_swapped if self._swapped is None else kept.key in self._swapped

    def _places(self, graph: int | None) -> tuple[KeptOp | None, ...]:
        """For each value, the op that made it; None for all where the places are not those of the graph."""
        traced = None if graph is None else traced_graph(graph)
        places = None if traced is None else traced.places
        beyond = [] if places is None else self._saved[len(places) :]  # random states, for ops that backward runs again
        if places is None or len(places) > len(self._saved) or not all(map(_is_random_state, beyond)):
            if self._saved:  # else nothing is recorded, as where no input wants a gradient
                warn_of_saved_swaps()
            return (None,) * len(self._saved)
        if self._swapped and traced is not None and not traced.is_marked:
            warn_of_saved_swaps()
        return places + (None,) * len(beyond)


# Dynamo must not trace what autograd calls while a compiled module runs.
compat.skip_in_compiler(_Collected.collect)
compat.skip_in_compiler(_unpack)
