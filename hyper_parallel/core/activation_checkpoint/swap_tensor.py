"""One tensor whose life the caller drives, and a storage of such tensors.

``SwapTensor`` is a thin layer over a record; ``Storage`` is a list of them, by op. Import them from ``swap``, which is their
public module.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import MutableMapping, MutableSet
from typing import Any, ClassVar, Final

from hyper_parallel.config import current_config
from hyper_parallel.core.activation_checkpoint.adapter import Stream, Tensor, TensorAdapter, tensor_adapter
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.residency import Residency
from hyper_parallel.errors import InPlaceChangeError, SwapStateError, SwapStateWarning

__all__ = [
    "STATE_D2H",
    "STATE_DEVICE",
    "STATE_H2D",
    "STATE_HOST",
    "STATE_NON_TENSOR",
    "Storage",
    "SwapTensor",
]

STATE_DEVICE: Final = Residency.DEVICE.value
STATE_D2H: Final = Residency.D2H.value
STATE_HOST: Final = Residency.HOST.value
STATE_H2D: Final = Residency.H2D.value
STATE_NON_TENSOR: Final = "non_tensor"


def _engine_of(tensors: TensorAdapter, tensor: Tensor) -> Engine | None:
    """The schedule of a tensor's device under the current settings; None where it cannot be moved."""
    from hyper_parallel.core.activation_checkpoint.swap import SwapManager

    if not tensors.is_copied_by_bytes(tensor):
        return None
    config = current_config()
    backend = tensors.backend_for(tensors.device_key(tensor), config)
    return None if backend is None else SwapManager().engine(backend, config)


SeenKeys = MutableSet[object] | MutableMapping[object, "SwapTensor"]


class SwapTensor:
    """One tensor whose life the caller drives: offload, wait, load, wait."""

    STATE_DEVICE: ClassVar = STATE_DEVICE
    STATE_D2H: ClassVar = STATE_D2H
    STATE_HOST: ClassVar = STATE_HOST
    STATE_H2D: ClassVar = STATE_H2D
    STATE_NON_TENSOR: ClassVar = STATE_NON_TENSOR

    def __init__(self, val: Any, funcname: str = "") -> None:
        self.funcname = funcname
        self.val: Any = val
        self._does_not_move = False
        self._is_duplicate = False
        self._shares_with: SwapTensor | None = None
        self._tensors: TensorAdapter | None = None
        self._record: Record | None = None
        self._state: str = STATE_NON_TENSOR
        self.ver = 0
        self.storage_size = 0
        self.is_slice_tensor = False
        tensors = tensor_adapter()
        engine = _engine_of(tensors, val) if tensors.is_plain_tensor(val) else None
        if engine is None:
            return
        self._tensors = tensors
        self._state = STATE_DEVICE
        self.ver = val._version
        self.storage_size = tensors.storage_bytes(val)
        self.is_slice_tensor = tensors.is_slice(val)
        self._view = tensors.view_of(val)
        self._record = engine.admit(tensors.flat_bytes(val), self.storage_size, position=Position(0), stays=True)

    def __repr__(self) -> str:
        if self._state == STATE_NON_TENSOR:
            return f"SwapTensor({self.funcname!r}, state={self._state!r})"
        owner = self if self._shares_with is None else self._shares_with
        has_device_bytes = owner._record is not None and owner._record.device_bytes is not None
        return (
            f"SwapTensor({self.funcname!r}, state={self._state!r}, storage_size={self.storage_size}, "
            f"is_shared={self._is_duplicate}, moves={not self._does_not_move}, "
            f"has_device_bytes={has_device_bytes})"
        )

    @property
    def state(self) -> str:
        """One of ``device``, ``d2h``, ``host``, ``h2d``, ``non_tensor``."""
        return self._state

    @property
    def val_cpu(self) -> Tensor | None:
        """The far copy as host bytes, where one exists in host memory."""
        return None if self._record is None else self._record.host_bytes()

    def _is_idle(self) -> bool:
        """Whether calls on it are no-ops: not a device tensor, a duplicate, or protected."""
        return self._record is None or self._does_not_move

    def _warn(self, call: str, expected: str) -> None:
        warnings.warn(
            f"SwapTensor {self.funcname!r}: {call}() was called while {self._state!r}, which does nothing; "
            f"it goes with {expected!r}",
            SwapStateWarning,
            stacklevel=3,
        )

    def dedup_key(self) -> object | None:
        """What two swap tensors over the same bytes have in common; None for what never moves."""
        if self._tensors is None or self.val is None:
            return None
        return self._tensors.storage_key(self.val)

    def mark_duplicate_swap(self, primary: SwapTensor | None = None) -> None:
        """These bytes move with another swap tensor; this one stays, or follows ``primary`` when it is given."""
        self._does_not_move = True
        self._is_duplicate = primary is not self
        if primary is not None and primary is not self and primary._record is not None:
            self._shares_with = primary
            self.val = None
            self._record = None

    def protect_if_aliases(self, outputs: Any) -> None:
        """Stay on the device if any tensor in ``outputs`` shares these bytes."""
        if self._is_idle() or self._tensors is None or self.val is None:
            return
        key = self._tensors.storage_key(self.val)
        if any(self._tensors.storage_key(output) == key for output in self._tensors.plain_tensors(outputs)):
            self._does_not_move = True

    def async_offload(self, copy_stream: Stream | None = None) -> None:
        """device → d2h: queue the copy out."""
        if self._is_idle():
            return
        if self._state != STATE_DEVICE:
            self._warn("async_offload", STATE_DEVICE)
            return
        assert self._tensors is not None, "a tensor that moves has an adapter"
        assert self._record is not None, "a tensor that moves has a record"
        if self.val._version != self.ver or self._tensors.storage_bytes(self.val) != self.storage_size:
            raise InPlaceChangeError(
                f"SwapTensor {self.funcname!r}: cannot be offloaded, because it was changed in place or resized since it was "
                f"recorded (version {self.ver} then, {self.val._version} now). Record it after the "
                "change, or clone it."
            )
        self._record.engine.launch_offload(self._record, stream=copy_stream)
        if self._record.has_far_copy:
            self._state = STATE_D2H

    def wait_offload(self) -> None:
        """d2h → host: compute is ordered after the copy and our device reference goes."""
        if self._is_idle() or self._state == STATE_HOST:
            return
        if self._state != STATE_D2H:
            self._warn("wait_offload", STATE_D2H)
            return
        assert self._record is not None
        self._record.engine.finish_offload(self._record)
        self.val = None
        self._state = STATE_HOST

    def resize_device_storage(self) -> None:
        """Make the buffer that the load will fill, on the compute stream."""
        if self._is_idle():
            return
        if self._state != STATE_HOST:
            self._warn("resize_device_storage", STATE_HOST)
            return
        assert self._record is not None
        self._record.prepare_load()

    def async_load(self, copy_stream: Stream | None = None) -> None:
        """host → h2d: queue the copy back."""
        if self._is_idle():
            return
        if self._state != STATE_HOST:
            self._warn("async_load", STATE_HOST)
            return
        assert self._record is not None
        self._record.engine.launch_load(self._record, stream=copy_stream)
        self._state = STATE_H2D

    def wait_load(self) -> None:
        """h2d → device: the current stream is ordered after the copy."""
        if self._is_idle() or self._state == STATE_DEVICE:
            return
        if self._state != STATE_H2D:
            self._warn("wait_load", STATE_H2D)
            return
        assert self._record is not None
        self._record.engine.finish_load(self._record)
        self.val = self._view.over(self._record.device_bytes)
        self.ver = self.val._version
        self._state = STATE_DEVICE

    def get_val(self) -> Tensor:
        """An equal tensor with the same strides."""
        if self._shares_with is not None:
            return self._view.over(self._shares_with.device_bytes())
        if self._state not in (STATE_DEVICE, STATE_NON_TENSOR):
            raise SwapStateError(
                f"SwapTensor {self.funcname!r}: cannot give its value while {self._state!r}; "
                "call async_load() and wait_load() first"
            )
        return self.val

    def device_bytes(self) -> Any:
        """The record's bytes on the device, brought back if need be."""
        assert self._record is not None, "only a tensor that moves is shared"
        return self._record.engine.fetch(self._record, None)


class Storage:
    """The values that one region saved and swapped, by op."""

    def __init__(self) -> None:
        self.save_storage: defaultdict[Any, list[Any]] = defaultdict(list)
        self.swap_storage: defaultdict[Any, list[Any]] = defaultdict(list)

    def iter_swap_tensors(self) -> list[SwapTensor]:
        """Every swap tensor, however deep it lies in what an op returned."""
        found: list[SwapTensor] = []
        stack: list[Any] = list(reversed(list(self.swap_storage.values())))
        while stack:
            item = stack.pop()
            if isinstance(item, SwapTensor):
                found.append(item)
            elif isinstance(item, dict):
                stack.extend(reversed(list(item.values())))
            elif isinstance(item, list | tuple | set | frozenset):
                stack.extend(reversed(list(item)))
        return found

    def mark_duplicate_swaps(self, seen_keys: SeenKeys) -> int:
        """Mark what is in ``seen_keys`` already, add the rest to it; how many were marked."""
        marked = 0
        for tensor in self.iter_swap_tensors():
            key = tensor.dedup_key()
            if key is None:
                continue
            if key in seen_keys:
                primary = seen_keys.get(key) if isinstance(seen_keys, MutableMapping) else None
                if primary is not tensor:
                    tensor.mark_duplicate_swap(primary)
                    marked += 1
            elif isinstance(seen_keys, MutableMapping):
                seen_keys[key] = tensor
            else:
                seen_keys.add(key)
        return marked

    def protect_output_tensors(self, outputs: Any) -> None:
        """Keep what the region's outputs share bytes with."""
        for tensor in self.iter_swap_tensors():
            tensor.protect_if_aliases(outputs)

    def launch_offload(self, copy_stream: Stream | None = None) -> None:
        """Queue every copy out."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == STATE_DEVICE:
                tensor.async_offload(copy_stream)

    def wait_offload(self) -> None:
        """Let go of every device reference whose copy was queued."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == STATE_D2H:
                tensor.wait_offload()

    def resize_device_storage(self) -> None:
        """Make every buffer that the loads will fill."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == STATE_HOST:
                tensor.resize_device_storage()

    def launch_load(self, copy_stream: Stream | None = None) -> None:
        """Queue every copy back."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == STATE_HOST:
                tensor.async_load(copy_stream)

    def wait_load(self) -> None:
        """Order the current stream after every queued load."""
        for tensor in self.iter_swap_tensors():
            if tensor.state == STATE_H2D:
                tensor.wait_load()
