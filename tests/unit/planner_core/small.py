"""A step small enough to be worked out by hand.

Two blocks of two ops. ``f`` takes 1 s and makes 10 bytes that ``g`` keeps for its backward; ``g`` takes 1 s and makes the
block's output of 4 bytes. The input has 3 bytes and is kept by ``f``. Backward takes 2 s per op, and 5 bytes beside what is
kept. 100 bytes are there anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hyper_parallel.planner.profile import (
    BaseBytes,
    Block,
    BlockKind,
    EngineSettings,
    FarCaps,
    Link,
    Measured,
    OpProfile,
    Profile,
    Versions,
)

F = OpProfile(name="f", seconds=1.0, output_bytes=10, kept_bytes=10, inputs=(-1,), kept_by=(1,), backward_bytes=5)
G = OpProfile(name="g", seconds=1.0, output_bytes=4, inputs=(0,), backward_bytes=5)
KIND = BlockKind(name="Block", ops=(F, G), backward_seconds=4.0, input_kept_by=(0,))
SETTINGS = EngineSettings(window_bytes=10, tail_bytes=0, prefetch_bytes=10, min_bytes=1, is_tunable=False)


def small_profile(*, blocks: int = 2, kind: BlockKind = KIND, **changes: Any) -> Profile:
    profile = Profile(
        versions=Versions(framework="none", framework_version="0", device="paper", library_version="0"),
        model_fingerprint="paper",
        base=BaseBytes(weights=60, gradients=30, optimizer=8, other=2),
        kinds=(kind,),
        blocks=tuple(Block(name=f"blocks.{at}", kind=0, input_bytes=3) for at in range(blocks)),
        measured=Measured(step_seconds=6.0 * blocks, peak_bytes=100 + 13 * blocks + 5),
        link=Link(out_bytes_per_second=5.0, in_bytes_per_second=5.0),
        far=FarCaps(host_bytes=1000),
        engine=SETTINGS,
    )
    return dataclasses.replace(profile, **changes)
