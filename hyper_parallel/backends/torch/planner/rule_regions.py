"""Rules applied to a torch model; see ``backends/planning/rule_regions.py``. A traced graph asks them once for each op."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.backends.planning import rule_regions
from hyper_parallel.backends.planning.module_paths import path_in_block
from hyper_parallel.backends.planning.rule_regions import POLICIES, AppliedRules, apply_rules_to
from hyper_parallel.backends.torch.graph_regions import InGraph, graph_region
from hyper_parallel.backends.torch.op_names import op_name
from hyper_parallel.backends.torch.planner.blocks import find_blocks, require_module
from hyper_parallel.backends.torch.planner.framework import TORCH
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.backends.torch.planner.survey import list_ops, require_step
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import PolicyTable
from hyper_parallel.planner.rules import INPUT, RuleSet
from hyper_parallel.platform.torch import compat

__all__ = ["AppliedRules", "RuledRegion", "apply_rules"]


class RuledRegion(rule_regions.RuledRegion):
    """A block of a torch model under rules."""

    framework = TORCH

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph."""
        policy = RulesInGraph(self._rules, self.block, self._inner, self._traced)
        region = graph_region(policy, f"rules on {label}")
        return InGraph(region=region, bound={}, swaps_inputs=self._swaps_inputs)


class RulesInGraph(PolicyTable):
    """The policy of a block under rules in a traced graph, where torch says which module an op belongs to.

    Equal for blocks to whose modules the same rules apply: they share compiled code, and the first of them is counted.
    """

    def __init__(self, rules: RuleSet, block: str, inner: tuple[str, ...], seen: Counter[tuple[str, str]]) -> None:
        self._rules = rules
        self._block = block
        self._key = (
            rules,
            tuple(
                (path, tuple(rule.matches_module(path_in_block(block, path)) for rule in rules.rules)) for path in inner
            ),
        )
        self.seen = seen  # one for all blocks that the rules were applied to in one call

    def answers_for(self, op: Any) -> Callable[[], CheckpointPolicy]:
        """See the base class."""
        self.seen[self._block, INPUT] = 1
        return functools.partial(self._answer, op_name(op))

    def _answer(self, name: str) -> CheckpointPolicy:
        path = path_in_block(self._block, compat.module_in_graph())
        self.seen[path, name] += 1
        rule = self._rules.rule_for(path, name)
        return POLICIES[rule.fate, rule.is_preference]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RulesInGraph) and self.seen is other.seen and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def apply_rules(
    model: Any, rules: RuleSet, *, blocks: str | Sequence[str] | None = None, step: Callable[[], Any] | None = None
) -> AppliedRules:
    """See ``hyper_parallel.apply_rules``."""
    who = "apply_rules"
    require_module(model, who)
    if step is None:
        found = find_blocks(model, blocks, who=who)
        return apply_rules_to(model, rules, found, region_class=RuledRegion, list_ops=None)
    require_step(step, who)
    found = find_blocks_of_step(model, blocks, step, who=who)
    table = functools.partial(list_ops, model, step, blocks=blocks)
    return apply_rules_to(model, rules, found, region_class=RuledRegion, list_ops=table)
