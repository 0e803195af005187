"""The ops of one decoder layer, and of what follows the layers: their work, and what autograd saves of them.

Every number is for one token of one layer. Reads and writes of element-wise ops are counted as bytes moved, because those ops
are limited by memory bandwidth; matmuls are counted as operations. What is saved follows from the backward of each op:
a matmul saves its input (once, however many matmuls read it), a product saves both factors, attention its inputs, its output
and one float for each head. Weights that are not trained need no second matmul in backward.
"""

from __future__ import annotations

import dataclasses

from hyper_parallel.estimation.shape import ModelShape

__all__ = ["LayerOp", "head_op", "layer_ops"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOp:
    """One op, or a few that share one fate."""

    name: str
    flops: float = 0.0
    """Of its matmuls, forward."""
    backward_flops: float = 0.0
    flops_per_length: float = 0.0
    """Of attention, forward: to be multiplied with the tokens of a sequence."""
    forward_bytes: float = 0.0
    """Read and written by element-wise ops."""
    backward_bytes: float = 0.0
    saved_bytes: float = 0.0
    """What plain autograd holds of it until backward."""
    planned_bytes: float = 0.0
    """What must be held where everything cheaper is made again: the value that those ops start from."""
    forward_launches: float = 0.0
    backward_launches: float = 0.0
    is_replayed: bool = True
    """False: nothing in backward needs what it makes, so a replay leaves it out."""


def layer_ops(shape: ModelShape, item_bytes: int) -> tuple[LayerOp, ...]:
    """The ops of one layer, in the order in which they run."""
    maker = _Maker(shape, item_bytes)
    mlp = maker.experts() if shape.experts else maker.mlp()
    entry, attention = (maker.entry(), maker.norm("attention norm")), maker.attention()
    return (*entry, *attention, maker.norm("mlp norm"), *maker.adapter_inputs(), *mlp)


def head_op(shape: ModelShape, item_bytes: int) -> LayerOp:
    """The last norm, the logits and the loss; empty without a vocabulary."""
    if not shape.vocabulary:
        return LayerOp(name="head")
    maker = _Maker(shape, item_bytes)
    norm = maker.norm("last norm")
    flops = 2.0 * shape.width * shape.vocabulary
    is_fused = shape.kernels == "liger"
    # Plain: to float32, log_softmax; in backward the gradient of the one, of the other, and back to the model's dtype.
    forward = 3 * item_bytes if is_fused else 12 + item_bytes
    backward = item_bytes if is_fused else 20 + item_bytes
    return LayerOp(
        name="head",
        flops=flops,
        backward_flops=flops * (1 if shape.lora_rank else 2),
        forward_bytes=norm.forward_bytes + forward * shape.vocabulary,
        backward_bytes=norm.backward_bytes + backward * shape.vocabulary,
        saved_bytes=norm.saved_bytes,
        planned_bytes=norm.saved_bytes,
        forward_launches=norm.forward_launches + 6,
        backward_launches=norm.backward_launches + 8,
    )


class _Maker:
    """Makes the ops of one shape."""

    def __init__(self, shape: ModelShape, item_bytes: int) -> None:
        self.shape = shape
        self.item = item_bytes
        self.is_plain_python = shape.kernels == "transformers"
        self.saves_matmul_inputs = not shape.has_float32_adapters  # else their float32 copies are saved instead

    def entry(self) -> LayerOp:
        """The layer's input. One kernel for a norm saves it; norms in float32 save their own copy instead."""
        nbytes = float(self.item * self.shape.width)
        return LayerOp(name="input", saved_bytes=0.0 if self.is_plain_python else nbytes, planned_bytes=nbytes)

    def norm(self, name: str) -> LayerOp:
        """A norm, and its output, which the matmuls after it save."""
        width, item = self.shape.width, self.item
        output = item if self.saves_matmul_inputs else 0
        if not self.is_plain_python:
            return _elementwise(name, width, forward=2 * item, backward=3 * item, saved=output, launches=(1, 2))
        # float32 copy, square, mean, product, copy back, product with the weight; and the backward of each of them.
        is_trained = not self.shape.lora_rank
        saved = 4 + output + (item if is_trained else 0)
        backward = 64 + 4 * item + (4 * item if is_trained else 0)
        return _elementwise(name, width, forward=28 + 4 * item, backward=backward, saved=saved, launches=(7, 14))

    def attention(self) -> tuple[LayerOp, ...]:
        """Queries, keys and values; rotation and norms of them; attention; the output's matmul and the residual."""
        shape, item = self.shape, self.item
        made = shape.query_width + 2 * shape.kv_width
        is_one_matrix = shape.kernels == "torch"
        qkv = self._matmul("qkv", ((shape.width, made),) if is_one_matrix else shape.linears[:3], saved=made * item)
        if not is_one_matrix:  # three gradients of one input are added
            qkv = dataclasses.replace(qkv, backward_bytes=qkv.backward_bytes + 6 * item * shape.width)
        core = LayerOp(
            name="attention",
            flops_per_length=2.0 * shape.query_width,
            saved_bytes=shape.query_width * item + 4 * shape.heads,
            planned_bytes=shape.query_width * item + 4 * shape.heads,
            forward_launches=1,
            backward_launches=3,
        )
        residual = shape.width * item  # norms in float32 save their own copy of it
        out = self._matmul("attention out", (shape.linears[3],), saved=residual)
        out = dataclasses.replace(out, saved_bytes=out.saved_bytes - (residual if self.is_plain_python else 0))
        out = self._with_residual(out)
        return (qkv, *self._positions(), core, out)

    def _positions(self) -> tuple[LayerOp, ...]:
        shape, item = self.shape, self.item
        rotated = shape.query_width + shape.kv_width
        ops = []
        if shape.has_qk_norm:
            norm = self.norm("query and key norm")
            scale = rotated / shape.width
            saved = (item if not self.is_plain_python else 4 + item) * rotated
            ops.append(
                dataclasses.replace(
                    norm,
                    forward_bytes=norm.forward_bytes * scale,
                    backward_bytes=norm.backward_bytes * scale,
                    saved_bytes=saved,
                    planned_bytes=saved,
                    forward_launches=2 * norm.forward_launches,
                    backward_launches=2 * norm.backward_launches,
                )
            )
        if shape.has_rotary:
            is_fused = shape.kernels == "liger"
            cost = (2 if is_fused else 10) * item
            launches = (1, 1) if is_fused else (10, 12)
            ops.append(_elementwise("rotary", rotated, forward=cost, backward=cost, saved=0, launches=launches))
        return tuple(ops)

    def mlp(self) -> tuple[LayerOp, ...]:
        """Gate and up, or up alone; the activation; down and the residual."""
        shape, item = self.shape, self.item
        inward = (shape.width, shape.hidden)
        up = self._matmul("up", (inward,), saved=shape.hidden * item)
        down = self._matmul("down", ((shape.hidden, shape.width),), saved=0)
        down = self._with_residual(dataclasses.replace(down, is_replayed=False))
        if not shape.is_gated:
            return up, self._activation(shape.hidden), down
        gate = dataclasses.replace(self._matmul("gate", (inward,), saved=shape.hidden * item))
        gate = dataclasses.replace(gate, backward_bytes=gate.backward_bytes + 3 * item * shape.width)
        return gate, up, self._activation(shape.hidden), down

    def adapter_inputs(self) -> tuple[LayerOp, ...]:
        """The float32 copies that adapters in float32 make of every linear's input."""
        if self.saves_matmul_inputs:
            return ()
        inner = sum(one[0] for one in self.shape.linears)
        moved = self.item + 4
        return (
            _elementwise(
                "adapter inputs", inner, forward=moved, backward=moved, saved=4, launches=(len(self.shape.linears),) * 2
            ),
        )

    def _activation(self, width: float) -> LayerOp:
        item = self.item
        output = item if self.saves_matmul_inputs else 0
        if not self.shape.is_gated:
            return _elementwise("activation", width, forward=2 * item, backward=3 * item, saved=output, launches=(1, 1))
        if self.shape.kernels == "liger":
            return _elementwise("activation", width, forward=3 * item, backward=5 * item, saved=output, launches=(1, 1))
        saved = item + output
        return _elementwise("activation", width, forward=5 * item, backward=9 * item, saved=saved, launches=(2, 3))

    def experts(self) -> tuple[LayerOp, ...]:
        """The router, the tokens gathered for each expert, the experts one after the other, and their sum."""
        shape, item = self.shape, self.item
        copies, width = shape.experts_per_token, shape.width
        made = shape.hidden * (2 if shape.is_gated else 1)
        router = 2.0 * width * shape.experts
        inward, back = 2.0 * copies * width * made, 2.0 * copies * shape.hidden * width
        trained = 1 if shape.lora_rank else 2
        each = shape.experts  # launches grow with the experts, not with the tokens
        return (
            LayerOp(
                name="router", flops=router, backward_flops=trained * router, forward_launches=8, backward_launches=8
            ),
            dataclasses.replace(
                _elementwise(
                    "gather",
                    copies * width,
                    forward=2 * item,
                    backward=4 * item,
                    saved=item,
                    launches=(3 * each, 3 * each),
                )
            ),
            LayerOp(
                name="expert in",
                flops=inward,
                backward_flops=trained * inward,
                saved_bytes=copies * made * item,
                planned_bytes=copies * made * item,
                forward_launches=each,
                backward_launches=3 * each,
            ),
            dataclasses.replace(
                self._activation(copies * shape.hidden), forward_launches=2 * each, backward_launches=4 * each
            ),
            LayerOp(
                name="expert out",
                flops=back,
                backward_flops=trained * back,
                saved_bytes=copies * width * item,
                planned_bytes=copies * width * item,
                forward_launches=each,
                backward_launches=3 * each,
            ),
            self._with_residual(
                dataclasses.replace(
                    _elementwise(
                        "sum of experts",
                        copies * width,
                        forward=5 * item,
                        backward=7 * item,
                        saved=0,
                        launches=(3 * each, 4 * each),
                    ),
                    is_replayed=False,
                )
            ),
        )

    def _matmul(self, name: str, linears: tuple[tuple[int, int], ...], *, saved: float) -> LayerOp:
        """A matmul of one input with one or more weights, with the adapters on them."""
        flops = sum(2.0 * inner * outer for inner, outer in linears)
        count, item, rank = len(linears), self.item, self.shape.lora_rank
        if not rank:
            op = LayerOp(name=name, flops=flops, backward_flops=2 * flops, saved_bytes=saved, planned_bytes=saved)
            return dataclasses.replace(op, forward_launches=count, backward_launches=3 * count)
        inner_sum, outer_sum = sum(one[0] for one in linears), sum(one[1] for one in linears)
        saved += count * rank * (item if self.saves_matmul_inputs else 4)
        forward, backward = item * (inner_sum + 6 * outer_sum), item * (5 * inner_sum + 4 * outer_sum)
        if not self.saves_matmul_inputs:  # the same in float32, and the sum goes back to the model's dtype
            forward = 4 * inner_sum + (24 + 2 * item) * outer_sum
            backward = (8 + 3 * item) * inner_sum + (20 + item) * outer_sum
        return LayerOp(
            name=name,
            flops=flops + 2.0 * rank * (inner_sum + outer_sum),
            backward_flops=flops + 4.0 * rank * (inner_sum + outer_sum),
            # The thin matmuls are limited by memory: the first reads the input, the second writes the output; scale and add.
            forward_bytes=forward,
            backward_bytes=backward,
            saved_bytes=saved,
            planned_bytes=saved,
            forward_launches=5 * count,
            backward_launches=9 * count,
        )

    def _with_residual(self, op: LayerOp) -> LayerOp:
        moved = 3 * self.item * self.shape.width
        return dataclasses.replace(
            op,
            forward_bytes=op.forward_bytes + moved,
            backward_bytes=op.backward_bytes + moved,
            forward_launches=op.forward_launches + 1,
            backward_launches=op.backward_launches + 1,
        )


def _elementwise(
    name: str, width: float, *, forward: float, backward: float, saved: float, launches: tuple[float, float]
) -> LayerOp:
    return LayerOp(
        name=name,
        forward_bytes=forward * width,
        backward_bytes=backward * width,
        saved_bytes=saved * width,
        planned_bytes=saved * width,
        forward_launches=launches[0],
        backward_launches=launches[1],
    )
