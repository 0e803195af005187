"""The explicit swap interface: one tensor, a storage of them, a named group, and the manager that is the door.

``SwapTensor`` is a thin face of a record; ``Storage`` a list of them; ``SwapGroup`` a named set that is launched and
awaited together. The automatic path needs none of them, but a group also holds the records that were packed under its
name, so that launching and waiting by hand force whatever the engine has not done yet, and do nothing twice.

This module imports no framework: the adapter of the platform in use says what a tensor is.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Container, Iterator, MutableMapping, MutableSet
from typing import Any, ClassVar, Final

from hyper_parallel.config import SwapConfig, current_config
from hyper_parallel.core.activation_checkpoint.adapter import (
    DeviceBackend,
    Stream,
    Tensor,
    TensorAdapter,
    tensor_adapter,
)
from hyper_parallel.core.activation_checkpoint.chain import Chain, DeclaredLayers
from hyper_parallel.core.activation_checkpoint.engine import BackwardTask, Engine
from hyper_parallel.core.activation_checkpoint.engines import Engines
from hyper_parallel.core.activation_checkpoint.marks import Marks
from hyper_parallel.core.activation_checkpoint.record import Position, Record
from hyper_parallel.core.activation_checkpoint.residency import Residency
from hyper_parallel.core.activation_checkpoint.statistics import Counters, SwapStats
from hyper_parallel.core.activation_checkpoint.summary import FirstStep
from hyper_parallel.core.activation_checkpoint.timing import Span
from hyper_parallel.errors import InPlaceChangeError, SwapStateError, SwapStateWarning

__all__ = [
    "STATE_D2H",
    "STATE_DEVICE",
    "STATE_H2D",
    "STATE_HOST",
    "STATE_NON_TENSOR",
    "Storage",
    "SwapGroup",
    "SwapManager",
    "SwapTensor",
]

STATE_DEVICE: Final = Residency.DEVICE.value
STATE_D2H: Final = Residency.D2H.value
STATE_HOST: Final = Residency.HOST.value
STATE_H2D: Final = Residency.H2D.value
STATE_NON_TENSOR: Final = "non_tensor"


def _engine_of(tensors: TensorAdapter, tensor: Tensor) -> Engine | None:
    """The schedule of a tensor's device under the current settings; None where it cannot be moved."""
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
            f"is_shared={self._shares_with is not None}, moves={not self._does_not_move}, "
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

    def get_val(self) -> Any:
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
        for storage in _alive(self._of_last_call):
            storage.wait_offload()
        for record in list(self.records):
            record.engine.finish_offload(record)
        return self._of_last_call

    def bring_back(self, of_call: list[weakref.ref[Storage]]) -> None:
        """The backward of one call begins: its storages are there from now on, and the group forgets them."""
        storages = _alive(of_call)
        try:
            for storage in storages:
                _launch_load(storage)
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


def _alive(of_call: list[weakref.ref[Storage]]) -> list[Storage]:
    return [storage for storage in (reference() for reference in of_call) if storage is not None]


def _launch_load(storage: Storage) -> None:
    storage.wait_offload()  # in case the next layer never ran
    storage.resize_device_storage()
    storage.launch_load()


class SwapManager:
    """The door: settings, engines, statistics, groups and declared chains of this process. There is one."""

    _instance: ClassVar[SwapManager | None] = None
    _birth: ClassVar[threading.Lock] = threading.Lock()
    _group_stack: ClassVar[contextvars.ContextVar[tuple[str, ...]]] = contextvars.ContextVar(
        "hyper_parallel_group", default=()
    )

    backends: dict[tuple[str, str], DeviceBackend]
    counters: Counters
    marks: Marks
    first_step: FirstStep

    def __new__(cls) -> SwapManager:
        """The one manager, born at first use."""
        if cls._instance is None:
            with cls._birth:
                if cls._instance is None:
                    instance = super().__new__(cls)
                    instance._begin()
                    cls._instance = instance
        return cls._instance

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self.backends = {}
        self.counters = Counters()
        self._engines = Engines(self.counters)
        self._groups: dict[str, SwapGroup] = {}
        self._declared = DeclaredLayers(self._groups, self._group_or_new)
        self.marks = Marks()
        self.first_step = FirstStep()

    # ------------------------------------------------------------------ engines

    def engine(self, backend: DeviceBackend, config: SwapConfig) -> Engine:
        """The schedule of one device under one set of settings."""
        return self._engines.of(backend, config)

    def start_prefetch(self, task: BackwardTask, engines: Container[Engine]) -> None:
        """A replay begins, and ``engines`` hold values of it."""
        for engine in self._engines.values():
            engine.start_prefetch(task, is_near=engine in engines)

    def trim_windows(self) -> None:
        """Values were saved on the device by others than the schedules: every engine checks its window again."""
        for engine in self._engines.values():
            engine.trim_window()

    def forget_backend(self, backend: DeviceBackend) -> None:
        """Drop the engines of a device that is going away; records still out keep theirs."""
        with self._lock:
            self.backends = {key: known for key, known in self.backends.items() if known is not backend}
            self._engines.forget_backend(backend)

    # ------------------------------------------------------------------ statistics

    def stats(self) -> SwapStats:
        """Everything counted since the last reset."""
        with self._lock:
            engines = self._engines.values()
            tiers = tuple(tier for far in self._engines.far_memories() for tier in far.statistics())
        for engine in engines:
            engine.clock.settle()
        return self.counters.snapshot(tiers=tiers, live_records=sum(len(engine.live_records()) for engine in engines))

    @contextlib.contextmanager
    def record_timeline(self) -> Iterator[list[Span]]:
        """Fill the yielded list, when the block ends, with every copy and stall inside it. Waits for the device then."""
        spans: list[Span] = []
        engines = self._engines.values()
        for engine in engines:
            engine.clock.start_recording()
        try:
            yield spans
        finally:
            for engine in engines:
                spans.extend(engine.clock.stop_recording())
            spans.sort(key=lambda span: span.start_us)

    def reset(self) -> None:
        """Back to the first moment: counters, groups, chains, engines, far memory. Records of living graphs keep theirs."""
        with self._lock:
            self._declared.clear()
            for far in self._engines.far_memories():
                far.close()
            simulated = {key: backend for key, backend in self.backends.items() if key[0].endswith("simulated")}
            self._begin()
            self.backends = simulated
        self._group_stack.set(())

    # ------------------------------------------------------------------ groups

    def _group(self, group_name: str) -> SwapGroup:
        group = self._groups.get(group_name)
        if group is None:
            known = ", ".join(sorted(map(repr, self._groups))) or "none"
            raise SwapStateError(f"SwapManager: unknown group {group_name!r}; known groups: {known}")
        return group

    def _group_or_new(self, group_name: str) -> SwapGroup:
        with self._lock:
            return self._groups.setdefault(group_name, SwapGroup(group_name))

    def add_storage(self, group_name: str, storage: Storage) -> None:
        """Add a storage to a group, which is made if there is none of that name."""
        self._group_or_new(group_name).add(storage)

    def launch_offload(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Queue the copies out of a group."""
        self._group(group_name).launch_offload(copy_stream)

    def wait_offload(self, group_name: str) -> None:
        """Let go of a group's device bytes."""
        self._group(group_name).wait_offload()

    def launch_load(self, group_name: str, copy_stream: Stream | None = None) -> None:
        """Queue the copies back of a group."""
        self._group(group_name).launch_load(copy_stream)

    def wait_load(self, group_name: str) -> None:
        """Order the current stream after a group's loads."""
        self._group(group_name).wait_load()

    def protect_output_tensors(self, group_name: str, outputs: Any) -> None:
        """Keep what ``outputs`` share bytes with."""
        self._group(group_name).protect_output_tensors(outputs)

    def release_group_storage(self, group_name: str) -> None:
        """Forget a group's storages; nothing happens for an unknown one."""
        group = self._groups.get(group_name)
        if group is not None:
            group.release()

    def is_last_group(self, group_name: str | None = None) -> bool:
        """Whether a group (the current one by default) ends its chain; False for an unknown one."""
        name = self.get_current_group_name() if group_name is None else group_name
        group = self._groups.get(name)
        return group is not None and group.is_last_group

    def get_current_group_name(self) -> str:
        """The name under which this thread and context packs; empty when there is none."""
        stack = self._group_stack.get()
        return stack[-1] if stack else ""

    def set_current_group_name(self, name: str) -> None:
        """Name the group of what this thread and context packs from now on; empty for none."""
        self._group_stack.set((name,) if name else ())
        if name:
            self._group_or_new(name)

    def current_group(self) -> SwapGroup | None:
        """The group that a new record joins."""
        stack = self._group_stack.get()
        return self._groups.get(stack[-1]) if stack else None

    def move_record_to_current_group(self, record: Record) -> None:
        """A later layer saves the same bytes again: the record joins that layer's group, and leaves with it."""
        group = self.current_group()
        if group is None or record.group is group or group.is_last_group:
            return
        if isinstance(record.group, SwapGroup):
            record.group.records.discard(record)
        record.group = group
        record.stays = record.is_protected = False
        group.records.add(record)
        if not record.has_far_copy:
            record.engine.enqueue(record)

    # ------------------------------------------------------------------ declared chains

    def set_forward_prefetch_layer(self, first_layer: Any, second_layer: Any) -> Chain:
        """Declare that ``second_layer`` runs after ``first_layer``. A hint, idempotent, harmless when execution differs."""
        return self._declared.declare(first_layer, second_layer, tensor_adapter().watch_layers)

    def enter_layer(self, layer: Any) -> bool:
        """A declared layer's forward begins: what it packs joins its group. False for a layer nobody declared."""
        group = self._declared.group_of(layer)
        if group is None:
            return False
        self._group_stack.set((*self._group_stack.get(), group.group_name))
        return True

    def leave_layer(self, layer: Any, outputs: Any, *, is_replay: bool) -> None:
        """Its forward is over: its values leave, unless it is the last; those of the layer before are gone by now."""
        group = self._declared.group_of(layer)
        if group is None:
            return
        stack = self._group_stack.get()
        if group.group_name in stack:
            self._group_stack.set(stack[: len(stack) - 1 - stack[::-1].index(group.group_name)])
        if is_replay:
            group.end_replay()
            return
        mine = group.end_call(outputs)
        theirs = [] if group.before is None else group.before.finish_last_call()
        if mine or theirs:
            known = weakref.ref(group)  # the hook lives on tensors that the group's storages may hold

            def backward_begins() -> None:
                group = known()
                if group is not None:
                    group.bring_back(mine)
                for storage in _alive(theirs):
                    _launch_load(storage)

            tensor_adapter().before_backward(outputs, backward_begins)
