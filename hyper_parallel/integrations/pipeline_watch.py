"""Tells the engine, while a pipeline's schedule runs, whose forward it is and in which order the backwards will come.

The stages' own methods for one micro-batch are called through functions that are put on the instances, and taken off again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.activation_checkpoint.swap import SwapManager
from hyper_parallel.planner.pipeline_order import Action, ActionKind, Order, loads_begin, turns_of

__all__ = ["ScheduleWatch"]


class ScheduleWatch:
    """One schedule of this rank. ``before_step`` is called with the step's arguments before each training step."""

    def __init__(
        self, schedule: Any, stages: list[Any], order: Order, before_step: Callable[[tuple[Any, ...], Any], None]
    ) -> None:
        self.schedule = schedule
        self._stages = stages
        self._order = order
        self._turns = turns_of(order)
        self._positions = {action: position for position, action in enumerate(order)}
        self._before_step = before_step
        self._put_on: list[tuple[Any, str, Any]] = []  # what it is on, and what was there
        self._is_in_step = False
        self.step = schedule.step  # the schedule's own

    def put_on(self) -> None:
        """Begin to watch."""
        self._replace(self.schedule, "step", self._run_step)
        for stage in self._stages:
            self._replace(stage, "forward_one_chunk", functools.partial(self._forward, stage, stage.forward_one_chunk))
            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                if hasattr(stage, name):
                    self._replace(stage, name, functools.partial(self._backward, stage, getattr(stage, name), name))

    def _replace(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        self._put_on.append((target, name, vars(target).get(name)))
        setattr(target, name, function)

    def remove(self) -> None:
        """Watch no more; nothing happens the second time."""
        while self._put_on:
            target, name, before = self._put_on.pop()
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)

    # ------------------------------------------------------------------ in the place of the schedule's and the stages' methods

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_step or not self.schedule._has_backward:
            return self.step(*args, **kwargs)
        self._before_step(args, kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One step of the schedule, with its order known to the engine."""
        turns = SwapManager().turns
        turns.begin(self._turns)
        self._is_in_step = True
        try:
            return self.step(*args, **kwargs)
        finally:
            self._is_in_step = False
            turns.end()

    def _forward(self, stage: Any, function: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
        turns = SwapManager().turns
        self._begin(Action(ActionKind.FORWARD, stage.stage_index, number))
        turns.packing = (stage.stage_index, number) if turns.is_known else None
        try:
            return function(number, *args, **kwargs)
        finally:
            turns.packing = None

    def _backward(
        self, stage: Any, function: Callable[..., Any], name: str, number: int, *args: Any, **kwargs: Any
    ) -> Any:
        kinds = [ActionKind.WEIGHT, ActionKind.BACKWARD]  # all of the first stage's backward is in the second half
        if name == "backward_one_chunk":
            kinds = [ActionKind.BACKWARD] if kwargs.get("full_backward", True) else [ActionKind.INPUT]
        for kind in kinds:
            if self._begin(Action(kind, stage.stage_index, number)):
                break
        return function(number, *args, **kwargs)

    def _begin(self, action: Action) -> bool:
        """An action begins; where it is a backward, or the next one is, loads for that one begin. False: not in the order."""
        manager = SwapManager()
        position = self._positions.get(action)
        if position is None or not manager.turns.is_known:
            return False
        manager.turns.advance(position)
        if loads_begin(self._order, position):
            manager.prefetch_next_turn(is_whole=action.kind is ActionKind.WEIGHT)
        return True
