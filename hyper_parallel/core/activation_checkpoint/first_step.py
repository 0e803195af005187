"""The end of the first step under ``checkpoint`` or ``swap``: then the one-line summary is written."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.activation_checkpoint.adapter import TensorAdapter
from hyper_parallel.core.activation_checkpoint.record import Position
from hyper_parallel.core.activation_checkpoint.summary import is_wanted
from hyper_parallel.core.activation_checkpoint.swap import SwapManager

__all__ = ["watch_first_step"]


def watch_first_step(output: Any, tensors: TensorAdapter, *, is_recomputed: bool, swapped_inputs: int = 0) -> Any:
    """Pass a region's output on. Until a first backward has run through one, hooks in the graph wait for its end.

    ``swapped_inputs``: the bytes of the region's inputs, where they may be swapped.
    """
    first_step = SwapManager().first_step
    if first_step.is_over or not tensors.is_recording() or tensors.is_in_backward():
        return output
    places = tensors.hook_places(output)
    if not places:
        return output
    if not is_wanted() or tensors.rank() != 0:
        first_step.is_over = True
        return output
    first_step.recomputed_regions += is_recomputed
    first_step.memory.input_bytes += swapped_inputs
    if first_step.memory.peak_before_bytes is None:
        first_step.memory.peak_before_bytes = tensors.device_peak_bytes()
        first_step.retries_before = tensors.allocator_retries()

    def queue_line(_: Any) -> None:
        """Write the line at the end of the backward that calls this hook."""
        manager = SwapManager()
        task = tensors.current_task(Position(0))
        if task is not None and not manager.first_step.is_over:
            manager.first_step.is_over = True
            task.at_end(
                lambda: manager.first_step.write_line(
                    manager.stats(), peak_bytes=tensors.device_peak_bytes(), retries=tensors.allocator_retries()
                )
            )

    for register in places:
        register(queue_line)
    return output
