"""The decoder stack of the H200 benchmark as a profile, from arithmetic and the times of its measured modes.

One layer's replay costs 10.8 ms at 8192 × 2 (whole-layer checkpoint against none), 2.0 of them in attention (the same with
attention saved), 0.75 in element-wise ops (with the matmuls saved as well); the rest is matmuls, in proportion to their
work. At 32768 × 1 attention grows with the length. The link is 55.3 GB/s.
"""

from __future__ import annotations

from hyper_parallel.planner.profile import (
    BLOCK_INPUT,
    BaseBytes,
    Block,
    BlockKind,
    Cut,
    CutRegion,
    EngineSettings,
    FarCaps,
    Link,
    Measured,
    OpProfile,
    Profile,
    Segment,
)
from hyper_parallel.records.versions import Versions

MIB, GIB = 2**20, 2**30
WIDTH, HIDDEN = 4096, 11008
NAMES = ("norm1", "qkv", "attention", "o", "x2", "norm2", "gate", "silu", "up", "product", "down", "out")


def stack_kind(
    tokens: int, *, matmul_seconds: float, attention_seconds: float, elementwise_seconds: float
) -> BlockKind:
    """One decoder layer of ``tokens`` tokens in bf16."""
    narrow, wide = tokens * WIDTH * 2, tokens * HIDDEN * 2
    unit = matmul_seconds / (3 * WIDTH + WIDTH + 2 * HIDDEN)  # seconds per output column of a matmul that reads WIDTH
    light = elementwise_seconds / (4 * narrow + 3 * wide)

    def op(
        name: str, module: str, seconds: float, made: int, inputs: tuple[int, ...], kept_by: tuple[int, ...], **more
    ):
        kept = made if kept_by else 0
        return OpProfile(
            name=name,
            module=module,
            seconds=seconds,
            output_bytes=made,
            kept_bytes=kept,
            inputs=inputs,
            kept_by=kept_by,
            **more,
        )

    weight = WIDTH * HIDDEN * 2
    ops = (
        op("_fused_rms_norm", "attention.norm", light * narrow, narrow, (-1,), (1,), backward_bytes=3 * narrow),
        op("mm", "attention.qkv", unit * 3 * WIDTH, 3 * narrow, (0,), (2,), backward_bytes=5 * narrow + weight),
        op("sdpa", "attention", attention_seconds, narrow, (1,), (2, 3), backward_bytes=8 * narrow),
        op("mm", "attention.o", unit * WIDTH, narrow, (2,), (), occurrence=1, backward_bytes=3 * narrow + weight),
        op("add", "attention", light * narrow, narrow, (BLOCK_INPUT, 3), (5,), backward_bytes=2 * narrow),
        op(
            "_fused_rms_norm", "mlp.norm", light * narrow, narrow, (4,), (6, 8), occurrence=1, backward_bytes=3 * narrow
        ),
        op("mm", "mlp.gate", unit * HIDDEN, wide, (5,), (7,), occurrence=2, backward_bytes=wide + 3 * narrow + weight),
        op("silu", "mlp", light * wide, wide, (6,), (9,), backward_bytes=3 * wide + narrow),
        op(
            "mm", "mlp.up", unit * HIDDEN, wide, (5,), (9,), occurrence=3, backward_bytes=2 * wide + 2 * narrow + weight
        ),
        op("mul", "mlp", light * 2 * wide, wide, (7, 8), (10,), backward_bytes=3 * wide + narrow),
        op("mm", "mlp.down", unit * HIDDEN, narrow, (9,), (), occurrence=4, backward_bytes=wide + narrow + weight),
        op("add", "mlp", light * narrow, narrow, (4, 10), (), occurrence=1, backward_bytes=2 * narrow),
    )
    halves = (
        CutRegion(module="attention", first_op=0, stop_op=5),
        CutRegion(module="mlp", first_op=5, stop_op=12, inputs=(4,)),
    )
    return BlockKind(
        name="DecoderLayer",
        ops=ops,
        cuts=(Cut(regions=(CutRegion(module="", first_op=0, stop_op=12),)), Cut(regions=halves)),
        backward_seconds=0.0,
        input_kept_by=(0,),
    )


def stack_profile(case: str) -> Profile:
    """``"8k"`` or ``"32k"``."""
    if case == "8k":
        tokens, layers, step, kind = 16384, 16, 0.660, (8.05e-3, 2.0e-3, 0.85e-3)
    else:
        tokens, layers, step, kind = 32768, 12, 1.494, (16.1e-3, 14.2e-3, 1.7e-3)
    block = stack_kind(tokens, matmul_seconds=kind[0], attention_seconds=kind[1], elementwise_seconds=kind[2])
    forward = sum(op.seconds for op in block.ops)
    block = BlockKind(
        name=block.name,
        ops=block.ops,
        cuts=block.cuts,
        backward_seconds=step / layers - forward,
        input_kept_by=block.input_kept_by,
    )
    narrow = tokens * WIDTH * 2
    weights = layers * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH) * 2
    return Profile(
        versions=Versions(
            framework="torch", framework_version="2.11.0+cu130", device="NVIDIA H200", library_version="0.1.0"
        ),
        model_fingerprint=f"stack-{case}",
        base=BaseBytes(weights=weights, gradients=weights, other=2 * narrow),  # the batch, and the weights of the loss
        kinds=(block,),
        blocks=tuple(  # the first input is the caller's own batch
            Block(name=f"layers.{index}", kind=0, input_bytes=narrow if index else 0) for index in range(layers)
        ),
        epilogue=Segment(forward_transient_bytes=2 * narrow, backward_transient_bytes=narrow),
        measured=Measured(step_seconds=step, peak_bytes=2 * weights + int(38.52 * GIB)),
        link=Link(out_bytes_per_second=55.3e9, in_bytes_per_second=55.4e9, copy_seconds=1e-5),
        far=FarCaps(host_bytes=64 * GIB),
        engine=EngineSettings(window_bytes=GIB, tail_bytes=GIB // 2, prefetch_bytes=3 * GIB // 4),
    )
