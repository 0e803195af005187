"""Which modes each case compares. Hand-written recipes, named by the memory they aim at."""

from __future__ import annotations

from typing import Any

from benchmarks.models import Case
from benchmarks.modes import (
    GIB,
    Recipe,
    _save_attention,
    _save_matmul_and_attention,
    last_kept,
    late_saves,
    none,
    ours,
    save_on_cpu,
    swap_everything,
    torch_mode,
    trl_mode,
)
from hyper_parallel import SwapConfig

MIB = 2**20


def config(window: float, *, prefetch: float, tail: float = 0.0) -> SwapConfig:
    return SwapConfig(window_bytes=int(window * GIB), prefetch_bytes=int(prefetch * GIB), tail_bytes=int(tail * GIB))


def peers(case: Case) -> dict[str, Any]:
    return {
        "none": none,
        "torch checkpoint": torch_mode(None),
        "torch SAC matmul+attention": torch_mode(_save_matmul_and_attention),
        "torch SAC attention": torch_mode(_save_attention),
        "save_on_cpu": save_on_cpu,
        "TRL offload": trl_mode(False),
        "TRL offload + checkpoint": trl_mode(True),
    }


def ours_8k() -> dict[str, Any]:
    wide = Recipe(swap=("qkv", "attention", "o"), save=("gate", "up"))
    split = Recipe(swap=("qkv", "attention"), is_split=True)
    split_save = Recipe(swap=("qkv", "attention"), save=("gate", "up"), is_split=True)
    lean = Recipe(swap=("attention",), is_split=True)
    return {
        "ours 15.3": ours(last_kept(2, wide), config(1.0, prefetch=0.5)),
        "ours 9.2": ours(late_saves(1, 6, split, split_save), config(1.0, prefetch=0.5)),
        "ours 5.2": ours(last_kept(1, split), config(1.0, prefetch=0.5)),
        "ours 4.0": ours(last_kept(1, lean), config(0.5, prefetch=0.3)),
        "ours inputs": ours(last_kept(0, Recipe()), config(0.5, prefetch=0.25)),
        "ours swap all": swap_everything(config(1.0, prefetch=1.0)),
    }


def ours_32k() -> dict[str, Any]:
    wide = Recipe(swap=("qkv", "attention", "o"), save=("gate", "up"))
    split = Recipe(swap=("qkv", "attention", "gate"), is_split=True)
    split_save = Recipe(swap=("qkv", "attention", "gate"), save=("up",), is_split=True)
    return {
        "ours 25.2": ours(last_kept(2, wide), config(2.0, prefetch=1.0)),
        "ours 15.1": ours(late_saves(1, 5, split, split_save), config(2.0, prefetch=1.0)),
        "ours 9.4": ours(last_kept(1, split), config(2.0, prefetch=1.0)),
        "ours 7.8": ours(last_kept(1, split), config(1.0, prefetch=0.5)),
        "ours inputs": ours(last_kept(0, Recipe()), config(0.5, prefetch=0.5)),
    }


def modes_for(case: Case) -> dict[str, Any]:
    modes = peers(case)
    if case.name in ("stack-8k", "llama-8k", "stack-tiny", "moe-4k"):
        modes |= ours_8k()
    else:
        modes |= ours_32k()
    return modes
