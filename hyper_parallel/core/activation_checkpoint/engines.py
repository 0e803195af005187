"""The engines of this process with their far memory, and how long each of them lives.

An engine is known by its device and its settings, far memory by those settings that shape it. Host memory is kept until the
manager is reset: it is reused for the whole run. A disk tier has threads and descriptors of its own, so it is kept

1. while a :class:`~hyper_parallel.config.SwapConfig` lives that it was asked for with (the current settings, a wrapper's), and
2. while it is the newest one, so that settings which are made anew for every step find their file again, and
3. while a record or an open region holds its engine, whatever the table says.

Otherwise its file is closed and its threads end when the next disk tier is made.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import DeviceBackend
from hyper_parallel.core.activation_checkpoint.engine import Engine
from hyper_parallel.core.activation_checkpoint.far.memory import FarMemory
from hyper_parallel.core.activation_checkpoint.statistics import Counters
from hyper_parallel.core.activation_checkpoint.turns import Turns

__all__ = ["Engines"]

FarKey = tuple[object, ...]


class Engines:
    """Finds or makes the engine of a device under some settings."""

    def __init__(self, counters: Counters, turns: Turns) -> None:
        self._counters = counters
        self._turns = turns
        self._lock = threading.RLock()
        # The weak tables find what lives; this list keeps an engine alive that has no other holder.
        self._known: weakref.WeakValueDictionary[tuple[int, SwapConfig], Engine] = weakref.WeakValueDictionary()
        self._far: weakref.WeakValueDictionary[FarKey, FarMemory] = weakref.WeakValueDictionary()
        self._held: dict[FarKey, set[Engine]] = {}
        self._held_far: dict[FarKey, FarMemory] = {}
        self._users: dict[FarKey, list[weakref.ref[SwapConfig]]] = {}  # of disk tiers

    def of(self, backend: DeviceBackend, config: SwapConfig) -> Engine:
        """The engine of one device under one set of settings."""
        key = (id(backend), config)  # the engine holds the backend, so its id names nothing else
        engine = self._known.get(key)
        if engine is None:
            with self._lock:
                engine = self._known.get(key)
                if engine is None:
                    # A copy of the settings: the caller's object says by its own life whether they are still used.
                    own = dataclasses.replace(config)
                    engine = Engine(backend, own, self._far_memory(own), self._counters, self._turns)
                    self._known[id(backend), own] = engine
                    self._held.setdefault(_far_key(config), set()).add(engine)
        if "disk" in config.tiers:
            self._add_user(engine, config)
        return engine

    def values(self) -> list[Engine]:
        """Every living engine."""
        return list(self._known.values())

    def far_memories(self) -> list[FarMemory]:
        """Every living far memory."""
        return list(self._far.values())

    def forget_backend(self, backend: DeviceBackend) -> None:
        """Drop the engines of a device that is going away; records still out keep theirs."""
        with self._lock:
            for key, engine in list(self._known.items()):
                if engine.backend is backend:
                    del self._known[key]
            for far_key, engines in self._held.items():
                self._held[far_key] = {engine for engine in engines if engine.backend is not backend}

    def _far_memory(self, config: SwapConfig) -> FarMemory:
        key = _far_key(config)
        far = self._far.get(key)
        if far is None:
            far = self._far[key] = self._held_far[key] = FarMemory(config)
            if "disk" in config.tiers:
                self._drop_unused_disks(newest=key)
        return far

    def _drop_unused_disks(self, *, newest: FarKey) -> None:
        for key, users in list(self._users.items()):
            if key != newest and all(user() is None for user in users):
                self._held.pop(key, None)
                self._held_far.pop(key, None)
                del self._users[key]

    def _add_user(self, engine: Engine, config: SwapConfig) -> None:
        key = _far_key(config)
        if any(user() is config for user in self._users.get(key, ())):
            return
        with self._lock:
            living = [user for user in self._users.get(key, ()) if user() is not None]
            self._users[key] = [*living, weakref.ref(config)]
            self._held.setdefault(key, set()).add(engine)
            self._held_far[key] = engine.far


def _far_key(config: SwapConfig) -> FarKey:
    return config.tiers, config.host_limit, config.disk_path, config.disk_limit, config.verify
