"""Hooks on modules that record when each block runs forward, replay and backward, and what the device holds then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hyper_parallel.backends.planning.module_tree import BlockRef, Module
from hyper_parallel.backends.step_observation.framework import ObservedFramework
from hyper_parallel.records.work_span import Track

__all__ = ["Mark", "ModuleRun", "ModuleWatch"]

Mark = Any  # a meter's mark: torch.Event | mindspore.runtime.Event | float


@dataclasses.dataclass
class ModuleRun:
    """One run of one module."""

    track: Track
    name: str
    start: Mark
    end: Mark = None


class ModuleWatch:
    """Hooks on every module of the blocks for one step; :meth:`remove` takes them off.

    A block's own run is its forward. Inside a backward the outermost module that runs is a replay, of a whole block or of a
    part of it. A replay from a tape runs no module: its region says when it begins and ends (:meth:`replays_from_tape`).
    """

    def __init__(  # meter: planning's Meter
        self, framework: ObservedFramework, blocks: Sequence[BlockRef], meter: Any, *, reads_memory: bool
    ) -> None:
        self.runs: list[ModuleRun] = []
        self.points: list[tuple[Mark, int, int]] = []  # (moment, peak since the moment before, bytes now)
        self.regions: dict[str, list[str]] = {}  # by reason: the regions that ran, as often as they did
        self._framework = framework
        self._meter = meter
        self._reads_memory = reads_memory
        self._open: list[tuple[Module, ModuleRun | None]] = []
        self._replays: list[ModuleRun] = []  # from a tape, that are not over: one may ask for the values of another
        self._names: dict[int, str] = {}  # by the id of a module of the blocks, which live as long as this
        self._handles: list[Any] = []  # the framework's handles of hooks
        for block in blocks:
            for path, module in framework.tree.named(block.module):
                name = f"{block.name}.{path}" if path else block.name
                self._names.setdefault(id(module), name)
                hook = _ModuleHook(self, name, is_block=not path)
                self._handles.append(module.register_forward_pre_hook(hook.begins, with_kwargs=True))
                self._handles.append(module.register_forward_hook(hook.ends, always_call=True))

    def point(self) -> Mark:
        """This moment, with what the device holds."""
        mark = self._meter.mark()
        if self._reads_memory:
            self.points.append((mark, self._meter.peak_bytes(), self._meter.active_bytes()))
            self._meter.reset_peak()
        return mark

    def replays_from_tape(self, region: Any, begins: bool) -> None:
        """A replay of a tape begins or ends. ``region`` is the module or the function whose ops were recorded."""
        mark = self.point()
        if not begins:
            self._replays.pop().end = mark
            return
        self._replays.append(ModuleRun(Track.REPLAY, self._name_of(region), mark))
        self.runs.append(self._replays[-1])

    def region_ran(self, region: Any, reason: str) -> None:
        """A region's forward ran; ``reason`` says why its Python runs again, and is empty where it runs from a tape."""
        self.regions.setdefault(reason, []).append(self._name_of(region))

    def _name_of(self, region: Any) -> str:
        return self._names.get(id(region)) or str(getattr(region, "__qualname__", type(region).__name__))

    def begins(self, module: Module, name: str, *, is_block: bool, given: Any) -> None:
        """A module's forward begins, for the first time or again."""
        mark, in_backward = self.point(), self._framework.is_in_backward()
        run = None
        if in_backward and not self._open:
            run = ModuleRun(Track.REPLAY, name, mark)
        elif is_block and not in_backward:
            run = ModuleRun(Track.FORWARD, name, mark)
            self._on_backward_end(name, given)
        self._open.append((module, run))
        if run is not None:
            self.runs.append(run)

    def ends(self, module: Module, name: str, *, is_block: bool, output: Any) -> None:
        """A module's forward ended; modules inside it that an early stop left open ended with it."""
        mark = self.point()
        while self._open:
            opened, run = self._open.pop()
            if run is not None:
                run.end = mark
            if opened is module:
                break
        if is_block and output is not None and not self._framework.is_in_backward():
            self._framework.on_backward(output, lambda *_: self._backward_begins(name))

    def _backward_begins(self, name: str) -> None:
        if not any(run.track is Track.BACKWARD and run.name == name and run.end is None for run in self.runs):
            self.runs.append(ModuleRun(Track.BACKWARD, name, self.point()))

    def _on_backward_end(self, name: str, given: Any) -> None:
        def is_over(*_: Any) -> None:
            for run in self.runs:
                if run.track is Track.BACKWARD and run.name == name and run.end is None:
                    run.end = self.point()

        self._framework.on_backward(given, is_over)

    def remove(self) -> None:
        """Take the hooks off; runs that never ended, end now."""
        for handle in self._handles:
            handle.remove()
        mark = self.point()
        for run in self.runs:
            if run.end is None:
                run.end = mark


class _ModuleHook:
    """The two hooks of one module."""

    def __init__(self, watch: ModuleWatch, name: str, *, is_block: bool) -> None:
        self._watch = watch
        self._name = name
        self._is_block = is_block

    def begins(self, module: Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook."""
        self._watch.begins(module, self._name, is_block=self._is_block, given=(args, kwargs))

    def ends(self, module: Module, args: Any, output: Any) -> None:
        """A forward hook."""
        self._watch.ends(module, self._name, is_block=self._is_block, output=output)
