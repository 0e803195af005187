"""One plain training step of a shape on a card: seconds and bytes, added up from its ops."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from hyper_parallel.estimation.cards import SHARES, Card, Shares
from hyper_parallel.estimation.layer_ops import LayerOp, head_op, layer_ops
from hyper_parallel.estimation.shape import ModelShape

__all__ = ["HOST_SECONDS_PER_OP", "StepModel"]

HOST_SECONDS_PER_OP: Final = 15e-6
"""What the host takes to issue one op, its Python and autograd included. It is assumed, not fitted: hosts differ by a factor
of three, and a step that is bound by it is marked so."""
_BACKWARD_PER_FORWARD: Final = 2.5  # operations of attention's backward: five matmuls where forward has two


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepModel:
    """Forward and backward of ``batch`` sequences of ``tokens`` tokens; the optimizer's step is not in it."""

    shape: ModelShape
    tokens: int
    batch: int
    card: Card
    item_bytes: int = 2
    shares: Shares = SHARES

    @functools.cached_property
    def ops(self) -> tuple[LayerOp, ...]:
        """Of one layer."""
        return layer_ops(self.shape, self.item_bytes)

    @functools.cached_property
    def head(self) -> LayerOp:
        """What follows the layers."""
        return head_op(self.shape, self.item_bytes)

    @property
    def all_tokens(self) -> int:
        """Of the whole batch."""
        return self.tokens * self.batch

    def forward_seconds(self, op: LayerOp) -> float:
        """Of one op of one layer, for the whole batch."""
        attention = op.flops_per_length * self.tokens / self.shares.attention_forward
        work = (op.flops / self.shares.matmul + attention) / self.card.flops
        return self.all_tokens * (work + self._moved(op.forward_bytes))

    def backward_seconds(self, op: LayerOp) -> float:
        """Of one op of one layer, for the whole batch."""
        attention = _BACKWARD_PER_FORWARD * op.flops_per_length * self.tokens / self.shares.attention_backward
        work = (op.backward_flops / self.shares.matmul + attention) / self.card.flops
        return self.all_tokens * (work + self._moved(op.backward_bytes))

    def _moved(self, nbytes: float) -> float:
        return nbytes / (self.card.memory_bytes_per_second * self.shares.bandwidth)

    @functools.cached_property
    def layers_forward_seconds(self) -> float:
        """Of all layers."""
        return self.shape.layers * sum(map(self.forward_seconds, self.ops))

    @functools.cached_property
    def device_seconds(self) -> float:
        """Of the whole step, on the device. New gradients are added to those that are there."""
        layers = self.shape.layers * sum(self.forward_seconds(op) + self.backward_seconds(op) for op in self.ops)
        head = self.forward_seconds(self.head) + self.backward_seconds(self.head)
        return layers + head + self._moved(3.0 * self.item_bytes * self.shape.trained_parameters)

    @functools.cached_property
    def host_seconds(self) -> float:
        """What the host takes to issue the step."""
        launches = sum(op.forward_launches + op.backward_launches for op in self.ops)
        outside = self.head.forward_launches + self.head.backward_launches
        return HOST_SECONDS_PER_OP * (self.shape.layers * launches + outside)

    @functools.cached_property
    def replay_seconds(self) -> float:
        """Forward of all layers once more, without what nothing in backward needs."""
        return self.shape.layers * sum(self.forward_seconds(op) for op in self.ops if op.is_replayed)

    @functools.cached_property
    def replay_launches(self) -> float:
        """Ops of all layers in that forward."""
        return self.shape.layers * sum(op.forward_launches for op in self.ops if op.is_replayed)

    @property
    def layer_bytes(self) -> float:
        """What autograd saves of one layer."""
        return self.all_tokens * sum(op.saved_bytes for op in self.ops)

    @property
    def boundary_bytes(self) -> float:
        """What goes from one layer into the next."""
        return float(self.all_tokens * self.shape.width * self.item_bytes)

    @property
    def replayed_half_bytes(self) -> float:
        """The larger half of a layer, made again: attention with its norm, or the MLP with its."""
        names = [op.name for op in self.ops]
        middle = names.index("mlp norm")
        halves = self.ops[:middle], self.ops[middle:]
        return self.all_tokens * max(sum(op.saved_bytes for op in half) for half in halves) + self.boundary_bytes

    @property
    def layer_transient_bytes(self) -> float:
        """What one layer's backward needs beside what is saved: two gradients in the MLP, and those of the residual."""
        shape = self.shape
        inside = 2.0 * shape.hidden if shape.is_gated else float(shape.hidden)
        if shape.experts:  # one expert after the other, each with its share of the tokens
            inside *= shape.experts_per_token / shape.experts
        return self.all_tokens * self.item_bytes * (inside + 2 * shape.width)

    @property
    def head_bytes(self) -> float:
        """What the loss holds at its peak: what the last norm saved, and in plain torch the logits three times in float32."""
        held = self.all_tokens * self.head.saved_bytes
        if not self.shape.vocabulary:
            return held
        if self.shape.kernels == "liger":  # both gradients are made in forward: of the weight and of the input
            return held + self.item_bytes * self.shape.vocabulary * self.shape.width + self.boundary_bytes
        return held + 12.0 * self.all_tokens * self.shape.vocabulary
