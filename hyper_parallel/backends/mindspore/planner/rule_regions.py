"""Rules applied to a MindSpore model; see ``backends/planning/rule_regions.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.backends.mindspore.planner.blocks import find_blocks, require_cell
from hyper_parallel.backends.mindspore.planner.framework import MINDSPORE
from hyper_parallel.backends.mindspore.planner.survey import find_blocks_of_step, list_ops
from hyper_parallel.backends.planning import rule_regions
from hyper_parallel.backends.planning.rule_regions import AppliedRules, apply_rules_to
from hyper_parallel.backends.planning.survey import require_step
from hyper_parallel.planner.rules import RuleSet

__all__ = ["AppliedRules", "RuledRegion", "apply_rules"]


class RuledRegion(rule_regions.RuledRegion):
    """A block of a MindSpore model under rules."""

    framework = MINDSPORE

    def _key(self, op: Any) -> str:
        return str(op.name)  # an op is a new object at every call


def apply_rules(
    model: Any, rules: RuleSet, *, blocks: str | Sequence[str] | None = None, step: Callable[[], Any] | None = None
) -> AppliedRules:
    """See ``hyper_parallel.apply_rules``."""
    who = "apply_rules"
    require_cell(model, who)
    if step is None:
        found = find_blocks(model, blocks, who=who)
        return apply_rules_to(model, rules, found, region_class=RuledRegion, list_ops=None)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    table = functools.partial(list_ops, model, step, blocks=blocks)
    return apply_rules_to(model, rules, found, region_class=RuledRegion, list_ops=table)
