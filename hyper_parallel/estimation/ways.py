"""What each way of keeping activations makes of a step: peak of activations, seconds, bytes in host memory.

The time of a copy is hidden as long as the link is done with all copies out before forward ends; loads have the whole of
backward. What a copy always costs is the device's memory bandwidth: its bytes are read there and written back. A plan swaps
first what is most expensive to make again, as much as the link hides, then makes again what is cheapest.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from hyper_parallel.estimation.layer_ops import LayerOp
from hyper_parallel.estimation.step_model import HOST_SECONDS_PER_OP, StepModel

__all__ = ["WORKSPACE_BYTES", "Outcome", "inputs_swapped", "kept", "planned", "recomputed", "smallest_plan", "swapped"]

WORKSPACE_BYTES: Final = 75 * 2**20
"""What the libraries behind matmuls hold for themselves. Fitted to the same case as ``cards.SHARES``."""
_WINDOW_BYTES: Final = 2**29  # copies that are on their way out
_PREFETCH_BYTES: Final = 3 * 2**28  # loads that run ahead
_HOST_SECONDS_PER_SWAP: Final = 115e-6  # benchmarks/results/host_cost_h200_202611.md


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One way of running a step."""

    activation_bytes: float
    """At the peak, beside weights, gradients and optimizer states."""
    device_seconds: float
    host_seconds: float
    host_bytes: float = 0.0
    """In host memory."""
    layers_swapped: int = 0

    @property
    def seconds(self) -> float:
        """Of one step: the device's, unless the host is slower."""
        return max(self.device_seconds, self.host_seconds)


def kept(step: StepModel) -> Outcome:
    """The plain step."""
    saved = step.shape.layers * step.layer_bytes
    return Outcome(
        activation_bytes=WORKSPACE_BYTES + saved + max(step.head_bytes, step.layer_transient_bytes),
        device_seconds=step.device_seconds,
        host_seconds=step.host_seconds,
    )


def recomputed(step: StepModel) -> Outcome:
    """Every layer keeps its input, and runs again in backward."""
    inputs = step.shape.layers * step.boundary_bytes
    return _replayed(step, inputs_on_device=inputs, swapped_bytes=0.0)


def inputs_swapped(step: StepModel) -> Outcome:
    """Every layer runs again in backward, and its input waits in host memory."""
    inputs = step.shape.layers * step.boundary_bytes
    return _replayed(step, inputs_on_device=min(inputs, _WINDOW_BYTES), swapped_bytes=inputs)


def _replayed(step: StepModel, *, inputs_on_device: float, swapped_bytes: float) -> Outcome:
    # The input of the layer that is replayed is among the inputs already, where autograd saves it.
    saves_input = step.ops[0].saved_bytes > 0
    in_layer = inputs_on_device + step.layer_bytes + step.layer_transient_bytes
    if saves_input and not swapped_bytes:
        in_layer -= step.boundary_bytes
    launches = step.replay_launches * HOST_SECONDS_PER_OP
    return Outcome(
        activation_bytes=WORKSPACE_BYTES + max(inputs_on_device + step.head_bytes, in_layer),
        device_seconds=step.device_seconds + step.replay_seconds + _copy_seconds(step, swapped_bytes),
        host_seconds=step.host_seconds
        + launches
        + (_HOST_SECONDS_PER_SWAP * step.shape.layers if swapped_bytes else 0.0),
        host_bytes=swapped_bytes,
    )


def swapped(step: StepModel) -> Outcome:
    """Whole layers go to host memory, as many as the link hides; the others stay as they are."""
    hidden = _hidden_bytes(step)
    layers = min(step.shape.layers - 1, int(hidden / step.layer_bytes))
    plain = kept(step)
    nbytes = layers * step.layer_bytes
    on_the_way = min(nbytes, float(_WINDOW_BYTES))
    values = sum(1 for op in step.ops if op.saved_bytes)
    return Outcome(
        activation_bytes=plain.activation_bytes - nbytes + on_the_way,
        device_seconds=plain.device_seconds + _copy_seconds(step, nbytes),
        host_seconds=plain.host_seconds + _HOST_SECONDS_PER_SWAP * layers * values,
        host_bytes=nbytes,
        layers_swapped=layers,
    )


def _hidden_bytes(step: StepModel) -> float:
    """What the link moves while forward runs."""
    return step.card.link_bytes_per_second * step.layers_forward_seconds


def _copy_seconds(step: StepModel, nbytes: float) -> float:
    """What copies of so many bytes out and back cost: bandwidth of the device's memory, and what forward cannot hide."""
    bandwidth = step.card.memory_bytes_per_second * step.shares.bandwidth
    exposed = max(0.0, nbytes - _hidden_bytes(step)) / step.card.link_bytes_per_second
    return 2 * nbytes / bandwidth + exposed


@dataclasses.dataclass(frozen=True)
class _Value:
    """What all layers together save of one op."""

    op: LayerOp
    nbytes: float
    replay_seconds: float
    can_be_replayed: bool


def _values(step: StepModel) -> list[_Value]:
    tokens = step.all_tokens * step.shape.layers
    return [
        _Value(op, tokens * op.planned_bytes, step.shape.layers * step.forward_seconds(op), op.name != "input")
        for op in step.ops
        if op.planned_bytes
    ]


def planned(step: StepModel, activation_bytes: float) -> Outcome | None:
    """The fastest way found whose activations stay below so many bytes; None where there is none.

    As in the planner, the simple ways are among them: nothing done, every layer recomputed, inputs swapped as well.
    """
    simple = (kept(step), recomputed(step), inputs_swapped(step))
    found = [one for one in simple if one.activation_bytes <= activation_bytes]
    if activation_bytes >= _mix_floor(step):
        found.append(_mixed(step, activation_bytes))
    return min(found, key=lambda one: one.seconds, default=None)


def smallest_plan(step: StepModel) -> float:
    """Activation bytes below which no plan gets."""
    return min(_mix_floor(step), recomputed(step).activation_bytes, inputs_swapped(step).activation_bytes)


def _mix_floor(step: StepModel) -> float:
    """A mix that keeps nothing: half a layer made again beside copies both ways, or the loss beside the last copies out."""
    everything = sum(value.nbytes for value in _values(step))
    in_layer = step.replayed_half_bytes + step.layer_transient_bytes + min(everything, _WINDOW_BYTES + _PREFETCH_BYTES)
    return WORKSPACE_BYTES + max(step.head_bytes + min(everything, float(_WINDOW_BYTES)), in_layer)


def _mixed(step: StepModel, activation_bytes: float) -> Outcome:
    plain = kept(step)
    # What is most expensive to make again for its bytes comes first; inputs cannot be made again at all.
    values = sorted(_values(step), key=lambda v: (not v.can_be_replayed, v.replay_seconds / v.nbytes), reverse=True)
    to_release = max(0.0, sum(value.nbytes for value in values) - (activation_bytes - _mix_floor(step)))
    swapped_bytes, swaps, left = _swap_first(values, min(to_release, _hidden_bytes(step)))
    replayed, launches, missing = _replay_cheapest(left, to_release - swapped_bytes)
    swapped_bytes += missing  # past what the link hides: inputs that nothing can make again
    return Outcome(
        activation_bytes=min(activation_bytes, plain.activation_bytes),
        device_seconds=plain.device_seconds + replayed + _copy_seconds(step, swapped_bytes),
        host_seconds=plain.host_seconds
        + step.shape.layers * (launches * HOST_SECONDS_PER_OP + swaps * _HOST_SECONDS_PER_SWAP),
        host_bytes=swapped_bytes,
    )


def _swap_first(values: list[_Value], most_bytes: float) -> tuple[float, float, list[_Value]]:
    """Bytes that are swapped, how many values of a layer that is, and what is left of each value."""
    swapped_bytes = swaps = 0.0
    left = []
    for value in values:
        nbytes = max(0.0, min(value.nbytes, most_bytes - swapped_bytes))
        swapped_bytes += nbytes
        share = nbytes / value.nbytes
        swaps += share
        if share < 1:
            left.append(
                dataclasses.replace(
                    value, nbytes=value.nbytes - nbytes, replay_seconds=value.replay_seconds * (1 - share)
                )
            )
    return swapped_bytes, swaps, left


def _replay_cheapest(left: list[_Value], need_bytes: float) -> tuple[float, float, float]:
    """Seconds and launches of replaying the cheapest values until ``need_bytes`` are released, and the bytes still missing."""
    seconds = launches = 0.0
    for value in reversed(left):
        if need_bytes <= 0 or not value.can_be_replayed:
            continue
        share = min(1.0, need_bytes / value.nbytes)
        seconds += share * value.replay_seconds
        launches += share * value.op.forward_launches
        need_bytes -= share * value.nbytes
    return seconds, launches, max(0.0, need_bytes)
