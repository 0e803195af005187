"""Every operation that a program may name, wherever it is written."""

from __future__ import annotations

from typing import Any

from fuzz import effects, operations, rare
from fuzz.operations import Spec

__all__ = ["EFFECTS", "FUNCTIONS", "RARE", "SPECS", "STATE", "Spec"]

_ONE = Spec()
_PAIR = Spec(ins=2)
_DRAW = Spec(is_random=True)
_DRAW_FRESH = Spec(has_number=True)

RARE: dict[str, dict[str, Spec]] = {
    "foreign": {
        "foreign_wave": _ONE,
        "foreign_pair": Spec(outs=2),
        "foreign_halves": Spec(outs=2, is_shareable=False),  # torch unpacks lists of outputs in place
        "foreign_thinned": _DRAW,
        "foreign_sprinkled": _DRAW,
        "foreign_numbers": _DRAW,
        "foreign_add_onto_": Spec(ins=2, writes=True, aliases=True),
        "foreign_shake_": Spec(writes=True, is_random=True),
    },
    "functions": {
        "function_input": _ONE,
        "function_output": _ONE,
        "function_middle": _ONE,
        "function_nothing": _ONE,
        "function_held": _ONE,
        "function_dirty_": Spec(writes=True, aliases=True),
        "function_once": _PAIR,
        "function_half": _PAIR,
        "function_steps": Spec(outs=2),
        "function_through": Spec(aliases=True),
        "function_recomputes": _ONE,
    },
    "draws": {
        "draw_rand": _DRAW,
        "draw_randn": _DRAW,
        "draw_into_empty": _DRAW,
        "draw_uniform": _DRAW,
        "draw_order": _DRAW,
        "draw_integers": _DRAW,
        "draw_by_generator": _DRAW_FRESH,
        "draw_thinned_by_generator": _DRAW_FRESH,
    },
    "leaves": {
        "fresh_leaf": Spec(aliases=True),
        "fresh_parameter": Spec(aliases=True),
        "linear_of_values": _PAIR,
        "gradient_inside": Spec(takes_gradient=True),
        "gradient_penalty": Spec(takes_gradient=True),
        "hooked": _ONE,
        "hooked_and_kept": _ONE,
    },
    "layouts": {
        "complex_product": _PAIR,
        "complex_conjugate": _PAIR,
        "complex_negative": _PAIR,
        "complex_wave": _ONE,
        "zero_stride": _ONE,
        "unfolded": Spec(aliases=True),
        "batch_norm": _ONE,
        "running": Spec(weights="b"),
    },
}

_STATE = Spec(weights="s")
_GLOBAL = Spec(is_random=True)

STATE: dict[str, Spec] = {
    "state_counts": _STATE,
    "state_appends": _STATE,
    "state_files": _STATE,
    "state_turns": _STATE,
    "state_remembers": _STATE,
    "state_averages": _STATE,
    "state_draws": _STATE,
    "state_throws": _STATE,
    "state_samples": _STATE,
    "global_throws": _GLOBAL,
    "global_samples": _GLOBAL,
}
"""State that forward writes and reads. Torch's own regions change it twice, so it is not among what every territory has."""

_EFFECT = Spec(weights="e")

EFFECTS: dict[str, Spec] = {
    "effect_counts": _EFFECT,
    "effect_prints": _EFFECT,
    "effect_caches": _EFFECT,
    "effect_files": _EFFECT,
    "effect_loads": _EFFECT,
    "effect_branches": _EFFECT,
    "effect_lengthens": _EFFECT,
    "effect_norms": _EFFECT,
    "raw_numpy": _ONE,
    "raw_halves": _ONE,
    "raw_fill": _ONE,
    "raw_dlpack": _ONE,
    "raw_data": _ONE,
    "raw_function": _ONE,
}
"""Effects in forward that happen once where a region runs from a tape, and writes that no op makes."""

SPECS: dict[str, Spec] = {**operations.SPECS}
for _family in RARE.values():
    SPECS.update(_family)
SPECS.update(STATE)
SPECS.update(EFFECTS)

FUNCTIONS: dict[str, Any] = {
    name: next(getattr(module, name) for module in (operations, rare, effects) if hasattr(module, name))
    for name in SPECS
}
