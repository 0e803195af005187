"""What the explicit swap interface asks about MindSpore tensors and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore

from hyper_parallel.backends.mindspore.devices import backend_for
from hyper_parallel.backends.mindspore.graph import is_in_backward
from hyper_parallel.backends.mindspore.storages import ViewSpec, flat_bytes, storage_key
from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.adapter import FlatBytes
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.core.trees import tree_map
from hyper_parallel.platform.mindspore import compat

__all__ = ["MindSporeTensorAdapter"]


class MindSporeTensorAdapter:
    """See ``border.TensorAdapter``."""

    def is_plain_tensor(self, value: Any) -> bool:
        """See the protocol."""
        return type(value) in (mindspore.Tensor, mindspore.Parameter)

    def plain_tensors(self, tree: Any) -> list[Any]:
        """See the protocol."""
        found: list[Any] = []
        tree_map(lambda leaf: found.append(leaf) if self.is_plain_tensor(leaf) else None, tree)
        return found

    def engine_of(self, tensor: Any) -> Engine | None:
        """See the protocol."""
        config = current_config()
        backend = backend_for(str(tensor.device), config)
        return None if backend is None else SwapManager().engine(backend, config)

    def storage_key(self, tensor: Any) -> int:
        """See the protocol. An address, which names the storage while the caller holds the tensor."""
        return storage_key(tensor)

    def storage_bytes(self, tensor: Any) -> int:
        """See the protocol."""
        return int(tensor.untyped_storage().nbytes())

    def version_of(self, tensor: Any) -> int:
        """See the protocol. MindSpore counts ``copy_``; ``assign`` and item assignment go uncounted."""
        return int(tensor._version)

    def is_slice(self, tensor: Any) -> bool:
        """See the protocol."""
        return int(tensor.nbytes) != self.storage_bytes(tensor)

    def view_of(self, tensor: Any) -> ViewSpec:
        """See the protocol."""
        return ViewSpec(tensor)

    def flat_bytes(self, tensor: Any) -> FlatBytes:
        """See the protocol."""
        return flat_bytes(tensor)

    def watch_layers(self, layers: Iterable[Any]) -> list[Any]:
        """See the protocol. The hooks are functions of a module, so a deepcopy or a pickle of the layer is harmless."""
        handles: list[Any] = []
        for layer in layers:
            if _before_forward not in layer._forward_pre_hook.values():
                handles.append(layer.register_forward_pre_hook(_before_forward))
                handles.append(layer.register_forward_hook(_after_forward, always_call=True))
        return handles

    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """See the protocol."""

        def gradient_arrives(gradient: Any) -> None:
            callback()

        for tensor in self.plain_tensors(outputs):
            tensor.register_hook(gradient_arrives)


def _before_forward(layer: Any, args: Any) -> None:
    SwapManager().enter_layer(layer)


def _after_forward(layer: Any, args: Any, outputs: Any) -> None:
    SwapManager().leave_layer(layer, outputs, is_replay=is_in_backward() or not compat.is_recording())
