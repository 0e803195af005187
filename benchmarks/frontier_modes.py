"""Which modes each case compares. Hand-written recipes, named by the memory they aim at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models import Case
from benchmarks.modes import (
    GIB,
    Recipe,
    _save_attention,
    _save_matmul_and_attention,
    alternate,
    last_kept,
    late_saves,
    none,
    ours,
    phases,
    plan_mode,
    save_on_cpu,
    swap_everything,
    torch_mode,
    trl_mode,
)
from hyper_parallel import SwapConfig

PLANS = Path(__file__).parent / "results" / "plans"


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
    if case.name in ("llama-8k", "llama-32k", "stack-small", "moe-4k"):  # the stacks show these two
        del modes["torch SAC attention"], modes["TRL offload + checkpoint"]
    if case.name == "llama-32k":
        del modes["torch SAC matmul+attention"]
    return modes


WIDE = Recipe(swap=("qkv", "attention", "o"), save=("gate", "up"))
HALVES = Recipe(swap=("qkv", "attention"), is_split=True)
HALVES_GATE = Recipe(swap=("qkv", "attention", "gate"), is_split=True)
HALVES_GATE_SAVE = Recipe(swap=("qkv", "attention", "gate"), save=("up",), is_split=True)
HALVES_ALL = Recipe(swap=("qkv", "attention", "gate", "up"), is_split=True)
HALVES_SAVED = Recipe(save=("qkv", "attention", "gate", "up"), swap_inputs=False, is_split=True)
HALVES_SAVE = Recipe(swap=("qkv", "attention"), save=("gate", "up"), is_split=True)
INPUTS = ours(last_kept(0, Recipe()), config(0.5, prefetch=0.25))


def planned(case: Case, *names: str) -> dict[str, Any]:
    """The planner's own plans for this case, as it saved them on the same kind of device."""
    files = {name: PLANS / f"{case.name}_{name}.json" for name in names}
    return {f"ours planned {name}": plan_mode(path) for name, path in files.items() if path.exists()}


def ours_8k(case: Case) -> dict[str, Any]:
    """Named by the memory bar each aims at. Early layers swap all that the link hides, late layers save."""
    roomy = config(0.5, prefetch=0.75)
    return {
        "ours 15.3": ours(phases((7, HALVES_ALL), (9, HALVES_SAVED)), roomy, act_gib=13.2),
        "ours 9.2": ours(phases((6, HALVES_GATE), (5, HALVES), (5, HALVES_SAVED)), roomy, act_gib=7.0),
        "ours 5.2": ours(phases((14, HALVES), (2, HALVES_SAVED)), roomy, act_gib=3.1),
        "ours 4.0": ours(late_saves(0, 1, HALVES, HALVES_SAVE), config(1.0, prefetch=0.75, tail=0.6)),
        **planned(case, "15.3", "9.2", "5.2", "4.0"),
        "ours inputs": INPUTS,
        "ours swap all": swap_everything(config(1.0, prefetch=1.0)),
    }


def ours_32k(case: Case) -> dict[str, Any]:
    """The same for the long sequence, where twice as many bytes hide."""
    return {
        "ours 25.2": ours(last_kept(1, WIDE), config(2.0, prefetch=1.5)),
        "ours 15.1": ours(late_saves(0, 10, HALVES_GATE, HALVES_GATE_SAVE), config(2.0, prefetch=1.5, tail=1.2)),
        "ours 9.4": ours(late_saves(0, 3, HALVES_GATE, HALVES_GATE_SAVE), config(2.0, prefetch=1.5, tail=1.2)),
        "ours 7.8": ours(last_kept(0, HALVES_GATE), config(2.0, prefetch=1.5, tail=1.2)),
        **planned(case, "25.2", "15.1", "9.4", "7.8"),
        "ours inputs": INPUTS,
    }


def ours_llama(case: Case) -> dict[str, Any]:
    """Hugging Face layers are one module each: one region per layer, its code untouched.

    The peak sits at the loss. What the device may hold at the end of the layers is what the logits leave.
    """
    gate = Recipe(swap=("qkv", "attention", "gate"))
    gate_o = Recipe(swap=("qkv", "attention", "o", "gate"))
    all_of_it = Recipe(swap=("qkv", "attention", "o", "gate", "up"))
    if case.model == "moe":
        attention = ours(last_kept(0, Recipe(swap=("qkv", "attention"))), config(0.5, prefetch=0.5))
        return {"ours attention": attention, **planned(case, "3.3")}
    if case.tokens <= 8192:
        by_hand = ours(alternate(gate, gate_o), config(0.5, prefetch=1.5), act_gib=2.3)
        return {"ours 8.4": by_hand, **planned(case, "8.4")}
    by_hand = ours(alternate(all_of_it, gate_o, gate_o), config(1.0, prefetch=3.0), act_gib=3.6)
    return {"ours 15.8": by_hand, **planned(case, "15.8")}


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
    return peers(case) | (ours_32k(case) if case.tokens > 8192 else ours_8k(case))
