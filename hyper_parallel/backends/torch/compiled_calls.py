"""A wrapper around a compiled module: the module is compiled once more, with the region inside its graph.

``torch.compile(block)``, ``block.compile()`` and a compiled ``forward`` keep the settings of their compilation (backend, mode,
``fullgraph``, ``dynamic``). A function that runs the block as a region is compiled with the same settings, and is called in place
of the compiled block. Where dynamo runs it uncompiled (a dispatch mode, too many recompilations, ``set_stance``), the region runs
around the compiled block, as it does around any other module.

What the policy or ``swap_inputs`` swaps is saved by the graph. Hooks around the call collect all that the graph saves, in its
order. When the call returns, the number of the graph that ran is known, and with it which places are swapped.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from hyper_parallel.backends.torch.graph_regions import GraphRegion, run_in_graph, warn_of_saved_swaps
from hyper_parallel.backends.torch.saved_places import end_watch, saved_places
from hyper_parallel.backends.torch.saved_tensors import TorchPacker
from hyper_parallel.backends.torch.storages import tensors_in
from hyper_parallel.backends.torch.tensor_adapter import TENSORS
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.first_step import watch_first_step
from hyper_parallel.core.activation_checkpoint.packed import KeptValue, Packed
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.torch import compat

__all__ = ["NOT_COMPILED", "call_compiled"]

NOT_COMPILED: Final = object()
"""What :func:`call_compiled` answers where nothing was run."""

_NUMBERS = itertools.count()
_RUNNERS: weakref.WeakKeyDictionary[GraphRegion, dict[type, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_COMPILED: weakref.WeakKeyDictionary[Any, tuple[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def call_compiled(
    region: GraphRegion, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], swap_config: SwapConfig | None
) -> Any:
    """Call a compiled module with the region inside its graph; ``NOT_COMPILED`` where it is not compiled as a whole."""
    compiler = compat.compiler_of(module)
    if compiler is None:
        return NOT_COMPILED
    run = _compiled(region, module, compiler)
    inside = compat.uncompiled(module)
    collected = None
    try:
        if region.policy is None and not region.swaps_inputs:
            output, graph = run(region, inside, *args, **kwargs)
        else:
            collected = _Collected(region, swap_config)
            with saved_tensors_hooks(collected.collect, _unpack):
                output, graph = run(region, inside, *args, **kwargs)
    except Exception as error:
        inner = getattr(error, "inner_exception", None)  # torch.compile wraps what a policy raises while it traces
        if isinstance(inner, HyperParallelError):
            raise inner from None
        raise
    finally:
        end_watch()
    if output is NOT_COMPILED:
        return output
    if collected is not None:
        collected.pack(graph, (args, kwargs) if region.swaps_inputs else ())
    return watch_first_step(output, TENSORS, is_recomputed=True)


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

    def __init__(self, region: GraphRegion, swap_config: SwapConfig | None) -> None:
        self._packer = TorchPacker(config=swap_config, where=region.where)
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
        is_marked = self._is_marked(graph)
        keys = {TENSORS.storage_key_if_any(tensor) for tensor in tensors_in(inputs)}
        for saved, marked in zip(self._saved, is_marked, strict=True):
            tensor = saved.take()
            if marked or TENSORS.storage_key_if_any(tensor) in keys:
                saved.packed = self._packer.pack(tensor)
            elif self._outer is not None:
                pack, unpack = self._outer
                saved.packed = _Shown(pack(tensor), unpack)
            else:
                saved.packed = KeptValue.of(tensor, self._packer.scope)
        self._packer.flush()
        SwapManager().trim_windows()

    def _is_marked(self, graph: int | None) -> tuple[bool, ...]:
        """For each value, whether the policy swaps it; for none where the places are not those of the graph."""
        places = None if graph is None else saved_places(graph)
        beyond = [] if places is None else self._saved[len(places) :]  # random states, for ops that backward runs again
        if places is None or len(places) > len(self._saved) or not all(map(_is_random_state, beyond)):
            if self._saved:  # else nothing is recorded, as where no input wants a gradient
                warn_of_saved_swaps()
            return (False,) * len(self._saved)
        return places + (False,) * len(beyond)


# Dynamo must not trace what autograd calls while a compiled module runs.
compat.skip_in_compiler(_Collected.collect)
compat.skip_in_compiler(_unpack)
