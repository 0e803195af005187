"""A step small enough to be worked out by hand.

Two blocks of two ops. ``f`` takes 1 s and makes 10 bytes that ``g`` keeps for its backward; ``g`` takes 1 s and makes the
block's output of 4 bytes. The input has 3 bytes and is kept by ``f``. Backward takes 2 s per op, and 5 bytes beside what is
kept. 100 bytes are there anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import Choice
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
)
from hyper_parallel.records.versions import Versions

F = OpProfile(name="f", seconds=1.0, output_bytes=10, kept_bytes=10, inputs=(-1,), kept_by=(1,), backward_bytes=5)
G = OpProfile(name="g", seconds=1.0, output_bytes=4, inputs=(0,), backward_bytes=5)
KIND = BlockKind(name="Block", ops=(F, G), backward_seconds=4.0, input_kept_by=(0,))
SETTINGS = EngineSettings(window_bytes=10, tail_bytes=0, prefetch_bytes=10, min_bytes=1, is_tunable=False)


_FATES = {"r": Fate.RECOMPUTE, "s": Fate.SAVE, "w": Fate.SWAP}


def short_choice(cut: int, inputs: str, fates: str) -> Choice:
    """A choice by letters, one for each region's input and one for each op: r recompute, s save, w swap."""
    return Choice(cut, tuple(map(_FATES.__getitem__, inputs)), tuple(map(_FATES.__getitem__, fates)))


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
