"""What the explicit swap interface asks about torch tensors and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hyper_parallel.backends.torch.devices import backend_for
from hyper_parallel.backends.torch.graph import is_in_backward
from hyper_parallel.backends.torch.storages import ViewSpec, flat_bytes, is_copied_by_bytes
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.trees import tree_map

__all__ = ["TorchTensorAdapter"]


class TorchTensorAdapter:
    """See ``border.TensorAdapter``."""

    def is_plain_tensor(self, value: Any) -> bool:
        """See the protocol."""
        return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided

    def plain_tensors(self, tree: Any) -> list[torch.Tensor]:
        """See the protocol."""
        found: list[torch.Tensor] = []
        tree_map(lambda leaf: found.append(leaf) if self.is_plain_tensor(leaf) else None, tree)
        return found

    def engine_of(self, tensor: torch.Tensor) -> Engine | None:
        """See the protocol."""
        if not is_copied_by_bytes(tensor, tensor.untyped_storage()):
            return None
        config = current_config()
        backend = backend_for(tensor.device, config)
        return None if backend is None else SwapManager().engine(backend, config)

    def storage_key(self, tensor: torch.Tensor) -> int:
        """See the protocol."""
        return int(tensor.untyped_storage()._cdata)

    def storage_bytes(self, tensor: torch.Tensor) -> int:
        """See the protocol."""
        return tensor.untyped_storage().nbytes()

    def version_of(self, tensor: torch.Tensor) -> int:
        """See the protocol."""
        return tensor._version

    def is_slice(self, tensor: torch.Tensor) -> bool:
        """See the protocol."""
        return tensor.nbytes != self.storage_bytes(tensor)

    def view_of(self, tensor: torch.Tensor) -> ViewSpec:
        """See the protocol."""
        return ViewSpec(tensor)

    def flat_bytes(self, tensor: torch.Tensor) -> FlatBytes:
        """See the protocol."""
        return flat_bytes(tensor.untyped_storage())

    def watch_layers(self, layers: Iterable[torch.nn.Module]) -> list[Any]:
        """See the protocol. The hooks are functions of a module, so a deepcopy or a pickle of the layer is harmless."""
        handles: list[Any] = []
        for layer in layers:
            if _before_forward not in layer._forward_pre_hooks.values():
                handles.append(layer.register_forward_pre_hook(_before_forward))
                handles.append(layer.register_forward_hook(_after_forward, always_call=True))
        return handles

    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """See the protocol."""
        tensors = [tensor for tensor in self.plain_tensors(outputs) if tensor.requires_grad]
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: callback(), mode="any")


def _before_forward(layer: torch.nn.Module, args: Any) -> None:
    SwapManager().enter_layer(layer)


def _after_forward(layer: torch.nn.Module, args: Any, outputs: Any) -> None:
    SwapManager().leave_layer(layer, outputs, is_replay=is_in_backward() or not torch.is_grad_enabled())
