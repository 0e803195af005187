"""MindSpore's tensors and autograd, as the engine sees them. The facts behind each answer are in ``storages`` and ``graph``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import mindspore
import mindspore.mint.distributed as dist

from hyper_parallel.backends.mindspore import graph, ops, storages
from hyper_parallel.backends.mindspore.devices import backend_for, copied
from hyper_parallel.backends.mindspore.op_registry import check_op_names
from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, TensorAdapter, View
from hyper_parallel.core.activation_checkpoint.statistics import KeepReason
from hyper_parallel.platform.mindspore import compat

__all__ = ["TENSORS", "MindSporeTensorAdapter"]


class MindSporeTensorAdapter(TensorAdapter):
    """See :class:`TensorAdapter`. MindSpore counts ``copy_``; ``assign`` and item assignment go uncounted."""

    def is_tensor(self, value: Any) -> bool:
        """See the base class."""
        return isinstance(value, mindspore.Tensor)

    def is_plain_tensor(self, value: Any) -> bool:
        """See the base class."""
        return type(value) in (mindspore.Tensor, mindspore.Parameter)

    def can_be_marked(self, value: Any) -> bool:
        """See the base class."""
        return type(value) is mindspore.Tensor

    def why_never_swapped(self, tensor: Any) -> str | None:
        """See the base class. A pack hook gets a parameter as a plain tensor that carries the parameter's description."""
        return None if tensor.param_info is None else KeepReason.PARAMETER

    def is_empty(self, tensor: Any) -> bool:
        """See the base class."""
        return bool(tensor.size == 0)

    def device_key(self, tensor: Any) -> Hashable:
        """See the base class."""
        return str(tensor.device)

    def backend_for(self, device_key: str, config: SwapConfig) -> DeviceBackend | None:
        """See the base class."""
        return backend_for(device_key, config)

    tensors_in = staticmethod(ops.tensors_in)

    def shapes_of(self, args: Any) -> list[Any]:
        """See the base class."""
        return [(tuple(tensor.shape), tensor.dtype) for tensor in ops.tensors_in(args)]

    def bytes_of(self, output: Any) -> int:
        """See the base class."""
        return sum(tensor.nbytes for tensor in ops.tensors_in((output,)))

    storage_key = staticmethod(storages.storage_key)

    def storage_bytes(self, tensor: Any) -> int:
        """See the base class."""
        return int(tensor.untyped_storage().nbytes())

    def is_slice(self, tensor: Any) -> bool:
        """See the base class."""
        return int(tensor.nbytes) != self.storage_bytes(tensor)

    def storage_watch(self, tensor: Any, holder: object) -> Callable[[], bool]:
        """See the base class. MindSpore does not tell when a storage dies (see "names of storages")."""
        reference = weakref.ref(holder)
        return lambda: reference() is not None

    flat_bytes = staticmethod(storages.flat_bytes)

    def view_of(self, tensor: Any) -> View:
        """See the base class."""
        return storages.ViewSpec(tensor)

    def version_token(self, tensor: Any, *, is_below_autograd: bool = False) -> storages.VersionToken:
        """See the base class."""
        return storages.VersionToken(tensor)

    def alias(self, tensor: Any, *, is_below_autograd: bool = False) -> Any:
        """See the base class. It does not share the version."""
        return storages.alias(tensor)

    def held_alias(self, tensor: Any) -> tuple[Any, storages.VersionToken]:
        """See the base class."""
        return storages.alias(tensor), storages.VersionToken(tensor)

    held_output = held_alias

    clone = staticmethod(copied)

    current_task = staticmethod(graph.current_task)
    is_in_backward = staticmethod(graph.is_in_backward)
    is_recording = staticmethod(compat.is_recording)
    next_sequence = staticmethod(graph.next_sequence)

    def before_backward(self, outputs: Any, callback: Callable[[], None]) -> None:
        """See the base class."""

        def gradient_arrives(gradient: Any) -> None:
            callback()

        for tensor in self.plain_tensors(outputs):
            tensor.register_hook(gradient_arrives)

    def hook_places(self, outputs: Any) -> list[Callable[[Callable[[Any], None]], Any]]:
        """See the base class."""
        tensors = [leaf for leaf in self.plain_tensors(outputs) if leaf.is_floating_point()]
        return [tensor.register_hook for tensor in tensors]

    def module_label(self, value: Any) -> str | None:
        """See the base class."""
        is_cell = isinstance(value, mindspore.nn.Cell)
        return type(getattr(value, "unwrap_cell", value)).__name__ if is_cell else None

    def forward_pre_hooks(self, layer: Any) -> Iterable[Any]:
        """See the base class."""
        return layer._forward_pre_hook.values()  # type: ignore[no-any-return]

    def rank(self) -> int:
        """See the base class."""
        return int(dist.get_rank()) if compat.GlobalComm.INITED else 0

    def check_op_names(self, names: list[str], where: str) -> None:
        """See the base class."""
        check_op_names(names, where)


TENSORS: Final = MindSporeTensorAdapter()
