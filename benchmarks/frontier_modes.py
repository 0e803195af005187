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
    """What people use today."""
    modes = {
        "none": none,
        "torch checkpoint": torch_mode(None),
        "torch SAC matmul+attention": torch_mode(_save_matmul_and_attention),
        "torch SAC attention": torch_mode(_save_attention),
        "TRL offload + checkpoint": trl_mode(True),
    }
    if case.name in ("stack-8k", "stack-tiny"):
        modes |= {"save_on_cpu": save_on_cpu, "TRL offload": trl_mode(False)}
    return modes


WIDE = Recipe(swap=("qkv", "attention", "o"), save=("gate", "up"))
SPLIT = Recipe(swap=("qkv", "attention"), is_split=True)
SPLIT_SAVE = Recipe(swap=("qkv", "attention"), save=("gate", "up"), is_split=True)
SPLIT_GATE = Recipe(swap=("qkv", "attention", "gate"), is_split=True)
SPLIT_GATE_SAVE = Recipe(swap=("qkv", "attention", "gate"), save=("up",), is_split=True)
INPUTS = ours(last_kept(0, Recipe()), config(0.5, prefetch=0.25))


def ours_8k() -> dict[str, Any]:
    """Named by the memory bar each aims at. No layer is kept whole: a tail does the same with less memory."""
    return {
        "ours 15.3": ours(last_kept(0, WIDE), config(2.0, prefetch=0.75, tail=0.75)),
        "ours 9.2": ours(late_saves(0, 8, SPLIT, SPLIT_SAVE), config(1.75, prefetch=0.75, tail=0.6)),
        "ours 5.2": ours(late_saves(0, 3, SPLIT, SPLIT_SAVE), config(1.0, prefetch=0.75, tail=0.6)),
        "ours 4.0": ours(late_saves(0, 1, SPLIT, SPLIT_SAVE), config(1.0, prefetch=0.75, tail=0.6)),
        "ours inputs": INPUTS,
        "ours swap all": swap_everything(config(1.0, prefetch=1.0)),
    }


def ours_32k() -> dict[str, Any]:
    """The same for the long sequence, where twice as many bytes hide."""
    return {
        "ours 25.2": ours(last_kept(1, WIDE), config(2.0, prefetch=1.5)),
        "ours 15.1": ours(late_saves(0, 10, SPLIT_GATE, SPLIT_GATE_SAVE), config(2.0, prefetch=1.5, tail=1.2)),
        "ours 9.4": ours(late_saves(0, 3, SPLIT_GATE, SPLIT_GATE_SAVE), config(2.0, prefetch=1.5, tail=1.2)),
        "ours 7.8": ours(last_kept(0, SPLIT_GATE), config(2.0, prefetch=1.5, tail=1.2)),
        "ours inputs": INPUTS,
    }


def ours_llama(case: Case) -> dict[str, Any]:
    """Hugging Face layers are one module each: one region per layer, its code untouched."""
    swap = Recipe(swap=("qkv", "attention"))
    late = Recipe(swap=("qkv", "attention"), save=("gate", "up"))
    gate = Recipe(swap=("qkv", "attention", "o", "gate"))
    gate_up = Recipe(swap=("qkv", "attention", "o", "gate"), save=("up",))
    if case.tokens <= 8192:
        return {
            "ours 8.4": ours(late_saves(0, 4, swap, late), config(1.0, prefetch=0.5, tail=0.3)),
            "ours 8.4b": ours(late_saves(0, 2, swap, late), config(1.0, prefetch=0.5, tail=0.3)),
        }
    return {
        "ours 15.8": ours(last_kept(0, gate), config(2.0, prefetch=1.5, tail=0.6)),
        "ours 15.8b": ours(late_saves(0, 3, gate, gate_up), config(1.5, prefetch=1.5, tail=0.6)),
    }


def ours_small() -> dict[str, Any]:
    """Launch-bound: what counts is the host. The same save list as torch's."""
    save = Recipe(save=("qkv", "attention", "o", "gate", "up"), swap_inputs=False)
    mixed = Recipe(save=("o", "gate", "up"), swap=("qkv", "attention"))
    return {
        "ours same save list": ours(last_kept(0, save), config(0.25, prefetch=0.1)),
        "ours mixed": ours(last_kept(0, mixed), config(0.25, prefetch=0.1, tail=0.05)),
    }


def modes_for(case: Case) -> dict[str, Any]:
    """Every mode of one case."""
    if case.model in ("llama", "moe"):
        return peers(case) | ours_llama(case)
    if case.name == "stack-small":
        return peers(case) | ours_small()
    return peers(case) | (ours_32k() if case.tokens > 8192 else ours_8k())
