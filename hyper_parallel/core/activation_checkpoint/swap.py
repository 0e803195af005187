"""The explicit swap interface: one tensor, a storage of them, a named group, and the manager of this process.

This module is the public import path of all of them. It imports no framework: the adapter of the platform in use says what
a tensor is.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, ClassVar

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend, Stream, tensor_adapter
from hyper_parallel.core.activation_checkpoint.chain import Chain, DeclaredLayers
from hyper_parallel.core.activation_checkpoint.engine import BackwardTask, Engine
from hyper_parallel.core.activation_checkpoint.engines import Engines
from hyper_parallel.core.activation_checkpoint.marks import THIS_THREAD, Marks
from hyper_parallel.core.activation_checkpoint.record import Record
from hyper_parallel.core.activation_checkpoint.statistics import Counters, SwapStats
from hyper_parallel.core.activation_checkpoint.summary import FirstStep
from hyper_parallel.core.activation_checkpoint.swap_group import SwapGroup, alive, launch_load
from hyper_parallel.core.activation_checkpoint.swap_tensor import (
    STATE_D2H,
    STATE_DEVICE,
    STATE_H2D,
    STATE_HOST,
    STATE_NON_TENSOR,
    Storage,
    SwapTensor,
)
from hyper_parallel.core.activation_checkpoint.timing import LinkSpan
from hyper_parallel.core.activation_checkpoint.turns import Turns
from hyper_parallel.errors import SwapStateError

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


class SwapManager:
    """Settings, engines, statistics, groups and declared chains of this process. There is one manager."""

    _instance: ClassVar[SwapManager | None] = None
    _instance_lock: ClassVar[threading.Lock] = threading.Lock()
    _group_stack: ClassVar[contextvars.ContextVar[tuple[str, ...]]] = contextvars.ContextVar(
        "hyper_parallel_group", default=()
    )

    backends: dict[tuple[str, str], DeviceBackend]
    counters: Counters
    marks: Marks
    turns: Turns
    first_step: FirstStep

    def __new__(cls) -> SwapManager:
        """The one manager, made at first use."""
        if cls._instance is None:
            with cls._instance_lock:
                if cls._instance is None:
                    instance = super().__new__(cls)
                    instance._begin()
                    cls._instance = instance
        return cls._instance

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self.backends = {}
        self.counters = Counters()
        self.turns = Turns()
        self._engines = Engines(self.counters, self.turns)
        self.groups: dict[str, SwapGroup] = {}  # by name; most programs have none
        self._declared = DeclaredLayers(self.groups, self._group_or_new)
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

    def prefetch_next_turn(self, *, is_whole: bool) -> None:
        """The next backward that a pipeline's schedule named is near."""
        for engine in self._engines.values():
            engine.prefetch_next_turn(is_whole=is_whole)

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
            engine.clock.read_finished()
        return self.counters.snapshot(tiers=tiers, live_records=sum(len(engine.live_records()) for engine in engines))

    def restart_first_step(self) -> None:
        """Something was applied to a model: the next step is its first one, and gets a line. Not while trial steps run."""
        if not self.first_step.is_trial:
            self.first_step = FirstStep(before=self.stats())

    @contextlib.contextmanager
    def record_timeline(self) -> Iterator[list[LinkSpan]]:
        """Fill the yielded list, when the block ends, with every copy and stall inside it. Waits for the device then."""
        spans: list[LinkSpan] = []
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
        """Back to the initial state: counters, groups, chains, engines, far memory. Records of living graphs keep theirs."""
        with self._lock:
            self._declared.clear()
            for far in self._engines.far_memories():
                far.close()
            simulated = {key: backend for key, backend in self.backends.items() if key[0].endswith("simulated")}
            self._begin()
            self.backends = simulated
        self._group_stack.set(())
        if THIS_THREAD.take_off is not None:
            THIS_THREAD.take_off()

    # ------------------------------------------------------------------ groups

    def _group(self, group_name: str) -> SwapGroup:
        group = self.groups.get(group_name)
        if group is None:
            known = ", ".join(sorted(map(repr, self.groups))) or "none"
            raise SwapStateError(f"SwapManager: unknown group {group_name!r}; known groups: {known}")
        return group

    def _group_or_new(self, group_name: str) -> SwapGroup:
        with self._lock:
            return self.groups.setdefault(group_name, SwapGroup(group_name))

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
        group = self.groups.get(group_name)
        if group is not None:
            group.release()

    def is_last_group(self, group_name: str | None = None) -> bool:
        """Whether a group (the current one by default) ends its chain; False for an unknown one."""
        name = self.get_current_group_name() if group_name is None else group_name
        group = self.groups.get(name)
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
        return self.groups.get(stack[-1]) if stack else None

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
        return self._declared.declare(first_layer, second_layer, _watch_layers)

    def enter_layer(self, layer: Any) -> bool:
        """A declared layer's forward begins: what it packs joins its group. False for a layer that was not declared."""
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
                    group.load_storages(mine)
                for storage in alive(theirs):
                    launch_load(storage)

            tensor_adapter().before_backward(outputs, backward_begins)


def _watch_layers(layers: Iterable[Any]) -> list[Any]:
    """Call ``enter_layer`` and ``leave_layer`` around the layers' forwards; removable handles.

    The hooks are functions of a module, so that a deepcopy or a pickle of the layer is harmless.
    """
    handles: list[Any] = []
    for layer in layers:
        if _before_forward not in tensor_adapter().forward_pre_hooks(layer):
            handles.append(layer.register_forward_pre_hook(_before_forward))
            handles.append(layer.register_forward_hook(_after_forward, always_call=True))
    return handles


def _before_forward(layer: Any, args: Any) -> None:
    SwapManager().enter_layer(layer)


def _after_forward(layer: Any, args: Any, outputs: Any) -> None:
    tensors = tensor_adapter()
    SwapManager().leave_layer(layer, outputs, is_replay=tensors.is_in_backward() or not tensors.is_recording())


def stats() -> SwapStats:
    """What became of saved values since the last ``SwapManager().reset()``: bytes by fate and reason, copy times, hits."""
    return SwapManager().stats()
