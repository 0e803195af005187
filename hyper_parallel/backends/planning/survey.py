"""The survey of a step: which blocks it runs, in which order, with which ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.backends.planning.module_paths import path_in_block
from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.backends.planning.observed import ObservedCall
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.rules import INPUT, OpRow, OpTable
from hyper_parallel.planner.step_inputs import InputShape, StepInputs

__all__ = ["Survey", "op_table", "require_step"]


def require_step(step: Any, who: str) -> Callable[[], Any]:
    """The step, or an error that says what was given instead."""
    if not callable(step):
        raise TypeError(f"{who}: step must be a callable that runs one forward and backward, got {step!r}")
    return step  # type: ignore[no-any-return]


@dataclasses.dataclass
class Survey:
    """What one step ran, in order."""

    calls: list[ObservedCall] = dataclasses.field(default_factory=list)
    shapes: list[tuple[InputShape, ...]] = dataclasses.field(default_factory=list)  # of each call's arguments
    inputs: StepInputs | None = None  # of the model; where the step calls only modules inside, of the first block
    has_backward: bool = False
    without_gradients: str = "torch.no_grad()"  # how the framework switches gradients off, for errors
    how_to_differentiate: str = "calls loss.backward()"

    def add_inputs(self, path: str, tensors: tuple[InputShape, ...]) -> None:
        """Write down what the model, or one of its blocks, was called with."""
        if self.inputs is None:
            self.inputs = StepInputs(module=path, tensors=tensors)
        elif self.inputs.module == path:
            self.inputs = self.inputs.merged(tensors)

    def check(self, who: str, blocks: Sequence[BlockRef]) -> None:
        """Refuse a step that runs no block with gradients, or no backward."""
        if not self.calls:
            raise PlanError(
                f"{who}: the step ran none of the model's blocks ({blocks[0].name} .. {blocks[-1].name}) with gradients enabled. "
                f"Give a step that calls this very model, in training, outside {self.without_gradients}."
            )
        if not self.has_backward:
            raise PlanError(
                f"{who}: the step never ran a backward through the blocks; activations are only kept for one. Give a step that "
                f"computes a loss from the model's output and {self.how_to_differentiate}."
            )


def op_table(calls: Iterable[ObservedCall]) -> OpTable:
    """Every op of these calls that a rule can name."""
    rows: dict[tuple[str, str], list[int]] = {}
    for call in calls:
        _count(rows, (call.block, INPUT), sum(call.input_storages.values()))
        for op in call.ops:
            if op.is_asked:
                path = path_in_block(call.block, op.module)
                _count(rows, (path, op.name), op.output_bytes)
    return OpTable(
        tuple(
            OpRow(module=module, op=op, count=count, output_bytes=nbytes)
            for (module, op), (count, nbytes) in rows.items()
        )
    )


def _count(rows: dict[tuple[str, str], list[int]], key: tuple[str, str], nbytes: int) -> None:
    row = rows.setdefault(key, [0, 0])
    row[0] += 1
    row[1] += nbytes
