"""What a person would write by hand for every block, as choices of the search: all recomputed, inputs swapped, the presets.

On compiled blocks also what torch's checkpoint is used for inside a graph: everything recomputed, attention saved.

The search starts from them too, and ``fit_memory`` measures those that its prediction cannot rule out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hyper_parallel.fates import Fate
from hyper_parallel.planner.block_trace import LEFT_ALONE, Choice
from hyper_parallel.planner.profile import BlockKind, Profile
from hyper_parallel.planner.rules import INPUT, PRESETS, RuleSet

__all__ = ["RECOMPUTED", "RECOMPUTED_SWAPPED", "choices_by_hand", "swapped_choices"]

RECOMPUTED: Final = "every block recomputed"
RECOMPUTED_SWAPPED: Final = "every block recomputed, its inputs swapped"  # the preset "boundary"

_OF_PRESETS: Final[Mapping[str, RuleSet]] = {
    RECOMPUTED_SWAPPED if name == "boundary" else f"the preset {name!r}": RuleSet.read(name) for name in PRESETS
}
_SAVES_ATTENTION: Final = {"*::sdpa": "save", "*::*": "recompute"}
_OF_GRAPHS: Final[Mapping[str, RuleSet]] = {
    "every block recomputed, attention saved": RuleSet.read({"*::input": "save", **_SAVES_ATTENTION}),
    "every block recomputed, attention saved, inputs swapped": RuleSet.read({"*::input": "swap", **_SAVES_ATTENTION}),
}


def choices_by_hand(profile: Profile) -> dict[str, tuple[Choice, ...]]:
    """By name; a way that comes to the same as an earlier one on this model is left out."""
    all_recomputed = tuple(_recomputed(profile.kind_of(at)) for at in range(len(profile.blocks)))
    found = {RECOMPUTED: all_recomputed}
    is_compiled = any(kind.graph is not None for kind in profile.kinds)
    for name, rules in {**_OF_PRESETS, **(_OF_GRAPHS if is_compiled else {})}.items():
        choices = [_choice(profile, profile.kind_of(at), rules) for at in range(len(profile.blocks))]
        if rules.spares_last_block:
            choices[-1] = LEFT_ALONE
        if tuple(choices) not in found.values():
            found[name] = tuple(choices)
    return found


def swapped_choices(profile: Profile) -> tuple[Choice, ...]:
    """About what a swap of whole blocks comes to: regions whose inputs leave, and every value that backward reads.

    A replay of such a region runs only ops whose outputs cannot be kept, which a block that is swapped as a whole does not.
    """
    found = []
    for at in range(len(profile.blocks)):
        kind = profile.kind_of(at)
        plain = _recomputed(kind)
        fates = tuple(
            (Fate.SWAP if op.output_bytes >= profile.engine.min_bytes else Fate.SAVE)
            if op.kept_bytes and op.is_keepable
            else Fate.RECOMPUTE
            for op in kind.ops
        )
        found.append(Choice(plain.cut, (Fate.SWAP,) * len(plain.inputs), fates))
    return tuple(found)


def _whole(kind: BlockKind) -> int:
    """The cut that makes the block one region, or the first."""
    return next((at for at, cut in enumerate(kind.cuts) if cut.regions[0].module == ""), 0)


def _recomputed(kind: BlockKind) -> Choice:
    cut = _whole(kind)
    return Choice(cut, (Fate.SAVE,) * len(kind.cuts[cut].regions), (Fate.RECOMPUTE,) * len(kind.ops))


def _choice(profile: Profile, kind: BlockKind, rules: RuleSet) -> Choice:
    plain = _recomputed(kind)
    fates = tuple(
        _fate(rules, op.name, nbytes=op.output_bytes, min_bytes=profile.engine.min_bytes)
        if op.is_keepable and op.output_bytes
        else Fate.RECOMPUTE
        for op in kind.ops
    )
    return Choice(plain.cut, (rules.rule_for("", INPUT).fate,) * len(plain.inputs), fates)


def _fate(rules: RuleSet, op: str, *, nbytes: int, min_bytes: int) -> Fate:
    """What is too small to leave stays."""
    fate = rules.rule_for("", op).fate
    return Fate.SAVE if fate is Fate.SWAP and nbytes < min_bytes else fate
