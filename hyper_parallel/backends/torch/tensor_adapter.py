"""Torch's tensors and autograd, as the engine sees them. The facts behind each answer are in ``storages`` and ``graph``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch import graph, native, storages
from hyper_parallel.backends.torch.devices import allocator_retries, backend_for, device_peak_bytes, refuse_capture
from hyper_parallel.backends.torch.op_registry import check_op_names
from hyper_parallel.backends.torch.ranks import local_processes
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, FlatBytes, TensorAdapter, View
from hyper_parallel.core.activation_checkpoint.packed import Scope, raise_changed
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.source import Source
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.core.activation_checkpoint.wrapper import ModuleWrapper

__all__ = ["TENSORS", "TorchTensorAdapter", "fastest_adapter"]

_current_graph_task_id = torch._C._current_graph_task_id


class TorchTensorAdapter(TensorAdapter):
    """See :class:`TensorAdapter`."""

    _task: graph.GraphTask | None = None  # the last one: every value of one backward asks for the same

    def is_tensor(self, value: Any) -> bool:
        """See the base class."""
        return isinstance(value, torch.Tensor)

    def is_plain_tensor(self, value: Any) -> bool:
        """See the base class."""
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided

    def why_never_swapped(self, tensor: torch.Tensor) -> str | None:
        """See the base class. Subclasses and sparse tensors have no plain storage."""
        if tensor.__class__ is not torch.Tensor:
            return KeepReason.PARAMETER if isinstance(tensor, torch.nn.Parameter) else KeepReason.EXOTIC
        try:
            tensor.untyped_storage()
        except storages.NO_STORAGE_ERRORS:
            return KeepReason.EXOTIC
        return None

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """See the base class."""
        return tensor.numel() == 0

    def device_key(self, tensor: torch.Tensor) -> Hashable:
        """See the base class."""
        return tensor.device

    def backend_for(self, device_key: torch.device, config: SwapConfig) -> DeviceBackend | None:
        """See the base class."""
        return backend_for(device_key, config)

    tensors_in = staticmethod(storages.tensors_in)
    shapes_of = staticmethod(storages.shapes_of)
    bytes_of = staticmethod(storages.bytes_of)

    def storage_key(self, tensor: torch.Tensor) -> int:
        """See the base class."""
        return int(tensor.untyped_storage()._cdata)

    storage_key_if_any = staticmethod(storages.storage_key_if_any)

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """See the base class."""
        return tensor.untyped_storage().nbytes()

    def is_slice(self, tensor: torch.Tensor) -> bool:
        """See the base class."""
        return tensor.nbytes != self.storage_bytes(tensor)

    def storage_watch(self, tensor: torch.Tensor, holder: object) -> Callable[[], bool]:
        """See the base class. Torch tells when a storage dies, so that ``holder`` is not needed."""
        return storages.storage_watch(tensor.untyped_storage())

    flat_bytes = staticmethod(storages.flat_bytes)

    def view_of(self, tensor: torch.Tensor) -> View:
        """See the base class."""
        return storages.ViewSpec(tensor)

    is_parameter_derived = staticmethod(storages.is_parameter_derived)

    def is_changed_piece(self, tensor: torch.Tensor, storage_bytes: int) -> bool:
        """See the base class."""
        return storages.is_changed_piece(tensor, storage_bytes)

    is_copied_by_bytes = staticmethod(storages.is_copied_by_bytes)
    version_token = staticmethod(storages.version_token)
    alias = staticmethod(storages.alias)

    def share_key(self, tensor: torch.Tensor) -> Hashable:
        """See the base class."""
        return storages.share_key(tensor)

    def held_alias(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class. An alias shares the version counter, and is its own token."""
        alias = storages.alias(tensor)
        return alias, alias

    def held_output(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class. The output itself: an alias made above autograd, later, costs a tenth of one made here."""
        return tensor, tensor

    def held_after_forward(self, held: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See the base class."""
        alias = storages.alias(held)
        return alias, alias

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class. The caller may be in an inference block; the copy outlives it."""
        with torch.inference_mode(False), storages.unseen():
            return tensor.clone()

    def source_of(self, tensor: torch.Tensor, is_below_autograd: bool) -> Source:
        """See the base class."""
        return storages.TorchSource(
            storages.ViewSpec(tensor),
            storages.version_token(tensor, is_below_autograd=is_below_autograd),
            storage_key=tensor.untyped_storage()._cdata,
            share_key=storages.share_key(tensor),
            is_alive=storages.storage_watch(tensor.untyped_storage()),
        )

    def view_for_backward(
        self, source: Source, device_bytes: FlatBytes, scope: Scope, *, counts_changes: bool
    ) -> torch.Tensor:
        """See the base class. The exception "views that are handed out": one view object for each set of bytes.

        The plain step's graph holds the tensor that it hands to a backward. Were ours the only one, and were it returned as a
        gradient, ``AccumulateGrad`` would take it over, and every later change of ``.grad`` would change the saved bytes.
        """
        views: dict[Any, tuple[torch.Tensor, int]] = device_bytes.__dict__.setdefault("handed_out", {})
        counts_with_source = counts_changes and source.is_of(device_bytes)  # type: ignore[attr-defined]  # of torch's sources
        if views:
            for known, version in tuple(views.values()):  # another thread may add to them
                if known._version != version:
                    raise_changed(scope, shape=known.shape, dtype=known.dtype, version=version, now=known._version)
            found = views.get((source, counts_with_source))
            if found is not None:
                return found[0]
        made: torch.Tensor = source.over(device_bytes)
        if counts_with_source:
            made = source.share_counter(made)  # type: ignore[attr-defined]  # of a TorchSource, or of the native class
        views[source, counts_with_source] = made, made._version
        return made

    def current_task(self, position: Position) -> graph.GraphTask | None:
        """See the base class."""
        key = _current_graph_task_id()
        if key == -1:
            return None
        task = self._task
        if task is None or task.key != key:
            task = self._task = graph.GraphTask(key)
        return task

    is_in_backward = staticmethod(graph.is_in_backward)
    is_recording = staticmethod(torch.is_grad_enabled)
    next_sequence = staticmethod(graph.next_sequence)

    def sequence_of_save(self) -> int:
        """See the base class. The node has its number when it saves."""
        return torch._C._autograd._get_sequence_nr() - 1

    def wanted_by(self) -> str:
        """See the base class."""
        node: Any = torch._C._current_autograd_node()  # torch.autograd.graph.Node | None
        return ", outside backward," if node is None else f", wanted by {type(node).name(node)},"

    refuse_capture = staticmethod(refuse_capture)

    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """See the base class."""
        tensors = [tensor for tensor in self.plain_tensors(outputs) if tensor.requires_grad]
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: callback(), mode="any")

    def hook_places(self, outputs: Any) -> list[Callable[[Callable[[Any], None]], Any]]:
        """See the base class. Nodes, and not tensors: a tensor with a hook warns when it is pickled."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        return [node.register_prehook for node in {tensor.grad_fn for tensor in tensors} if node is not None]

    def module_label(self, value: Any) -> str | None:
        """See the base class."""
        if not isinstance(value, torch.nn.Module):
            return None
        # Not `hasattr`: a module takes long to say that it has no such attribute.
        return type(value.wrapped_module if isinstance(value, ModuleWrapper) else value).__name__

    def device_peak_bytes(self) -> int | None:
        """See the base class."""
        return device_peak_bytes()

    def allocator_retries(self) -> int:
        """See the base class."""
        return allocator_retries()

    def check_op_names(self, names: list[str], where: str) -> None:
        """See the base class."""
        check_op_names(names, where)

    def forward_pre_hooks(self, layer: torch.nn.Module) -> Iterable[Any]:
        """See the base class."""
        return layer._forward_pre_hooks.values()

    def local_processes(self) -> int:
        """See the base class."""
        return local_processes()

    def rank(self) -> int:
        """See the base class."""
        distributed = torch.distributed
        return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


TENSORS: Final = TorchTensorAdapter()


class _NativeAdapter(TorchTensorAdapter):
    """The same answers. The native extension gives those that are asked for every tensor, and passes on what is not plain."""

    def __init__(self, extension: Any) -> None:
        extension.set_python_way(TENSORS, torch.nn.Parameter, KeepReason, storages.PASS_THROUGH, storages.LONGEST_CHAIN)
        for name in ("storage_bytes", "why_kept", "source_of", "flat_bytes", "sequence_of_save"):
            setattr(self, name, getattr(extension, name))


@functools.cache
def _native_adapter() -> TorchTensorAdapter:
    return _NativeAdapter(native.load())


def fastest_adapter() -> TorchTensorAdapter:
    """The adapter with the native extension's answers, where there is one."""
    return TENSORS if native.load() is None else _native_adapter()
