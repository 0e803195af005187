"""A named set of storages and records that is launched and awaited together. Import it from ``swap``.

The automatic path needs no group, but a group also holds the records that were packed under its name, so that launching and
waiting by hand force whatever the engine has not done yet, and do nothing twice.
"""

from __future__ import annotations

import weakref
from typing import Any

from hyper_parallel.core.activation_checkpoint.adapter import Stream, tensor_adapter
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.swap_tensor import Storage, SwapTensor
from hyper_parallel.errors import SwapStateError

__all__ = ["SwapGroup", "alive", "launch_load"]


class SwapGroup:
    """A named set of storages and records that is launched and awaited together."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self.is_last_group = False
        self.before: SwapGroup | None = None
        self.records: weakref.WeakSet[Record] = weakref.WeakSet()
        self._storages: list[Storage] = []
        self._new: list[Storage] = []
        self._of_last_call: list[weakref.ref[Storage]] = []
        self._seen: dict[object, SwapTensor] = {}
        self._has_launched_offload = False
        self._has_launched_load = False

    def add(self, storage: Storage) -> None:
        """Add a storage; bytes that the group holds already are moved once."""
        self._storages.append(storage)
        self._new.append(storage)
        self._mark_duplicates(storage)

    def _mark_duplicates(self, storage: Storage) -> None:
        # The key of a tensor that has left may name other bytes by now.
        self._seen = {key: tensor for key, tensor in self._seen.items() if tensor.val is not None}
        storage.mark_duplicate_swaps(self._seen)

    def protect_output_tensors(self, outputs: Any) -> None:
        """Keep what ``outputs`` share bytes with, as long as it belongs to this group."""
        for storage in self._storages:
            storage.protect_output_tensors(outputs)
        tensors = tensor_adapter()
        keys = {tensors.storage_key(output) for output in tensors.plain_tensors(outputs)}
        for record in list(self.records):
            if record.storage_key in keys and not record.has_far_copy:
                record.is_protected = True

    def launch_offload(self, copy_stream: Stream | None = None) -> None:
        """Queue every copy out that was not queued yet."""
        self._has_launched_offload = True
        for storage in self._storages:
            self._mark_duplicates(storage)
            storage.launch_offload(copy_stream)
        for record in sorted(self.records, key=lambda record: record.position.sequence):
            if not record.is_protected:
                record.engine.launch_offload(record, stream=copy_stream)

    def wait_offload(self) -> None:
        """Let go of the device bytes; compute is ordered after the copies."""
        self._require(self._has_launched_offload, "wait_offload", "launch_offload")
        for storage in self._storages:
            storage.wait_offload()
        for record in list(self.records):
            record.engine.finish_offload(record)

    def launch_load(self, copy_stream: Stream | None = None) -> None:
        """Queue every copy back that was not queued yet."""
        self._has_launched_load = True
        for storage in self._storages:
            storage.resize_device_storage()
            storage.launch_load(copy_stream)
        for record in sorted(self.records, key=lambda record: -record.position.sequence):
            record.engine.launch_load(record, stream=copy_stream)

    def wait_load(self) -> None:
        """Order the current stream after the loads, and release the storages, also when a load failed."""
        self._require(self._has_launched_load, "wait_load", "launch_load")
        try:
            for storage in self._storages:
                storage.wait_load()
            for record in list(self.records):
                record.engine.finish_load(record)
        finally:
            self.release()

    def release(self) -> None:
        """Forget the storages; the engine's records belong to their graphs."""
        self._storages = []
        self._new = []
        self._seen = {}
        self._has_launched_offload = self._has_launched_load = False

    # What a declared chain does; the engine's records find their own way back.

    def end_call(self, outputs: Any) -> list[weakref.ref[Storage]]:
        """The layer's forward is over: its values leave, unless it is the last. The storages of this call."""
        self._of_last_call = [weakref.ref(storage) for storage in self._new]
        self._new = []
        self.protect_output_tensors(outputs)
        if not self.is_last_group:
            self.launch_offload()
        return self._of_last_call

    def end_replay(self) -> None:
        """A replay of the layer is over: what it added is used at once and does not leave."""
        self._forget(self._new)
        self._new = []

    def finish_last_call(self) -> list[weakref.ref[Storage]]:
        """The next layer's forward is over: what the last call queued is gone. The storages of that call."""
        for storage in alive(self._of_last_call):
            storage.wait_offload()
        for record in list(self.records):
            record.engine.finish_offload(record)
        return self._of_last_call

    def load_storages(self, of_call: list[weakref.ref[Storage]]) -> None:
        """The backward of one call begins: load its storages, which the group then forgets."""
        storages = alive(of_call)
        try:
            for storage in storages:
                launch_load(storage)
                storage.wait_load()
        finally:
            self._forget(storages)

    def _forget(self, storages: list[Storage]) -> None:
        gone = {id(storage) for storage in storages}
        self._storages = [storage for storage in self._storages if id(storage) not in gone]
        left = {id(tensor) for storage in self._storages for tensor in storage.iter_swap_tensors()}
        self._seen = {key: tensor for key, tensor in self._seen.items() if id(tensor) in left}

    def _require(self, is_launched: bool, call: str, before: str) -> None:
        if not is_launched:
            raise SwapStateError(
                f"SwapGroup {self.group_name!r}: {call}() was called before {before}(); launch first, then wait"
            )


def alive(of_call: list[weakref.ref[Storage]]) -> list[Storage]:
    """Those of a call's storages that still exist."""
    return [storage for storage in (reference() for reference in of_call) if storage is not None]


def launch_load(storage: Storage) -> None:
    """Queue the copies back of one storage."""
    storage.wait_offload()  # in case the next layer never ran
    storage.resize_device_storage()
    storage.launch_load()
