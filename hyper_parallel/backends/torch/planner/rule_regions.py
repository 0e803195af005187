"""Rules applied: a region in the place of every block, whose policy asks the rules by module path and op name."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch.checkpointing import checkpoint
from hyper_parallel.backends.torch.graph_regions import InGraph, graph_region
from hyper_parallel.backends.torch.planner.blocks import BlockRef, find_blocks, require_module
from hyper_parallel.backends.torch.planner.module_calls import find_blocks_of_step
from hyper_parallel.backends.torch.planner.module_paths import ModulePaths, path_in_block
from hyper_parallel.backends.torch.planner.op_names import op_name
from hyper_parallel.backends.torch.planner.replacements import AppliedBlocks, Replacements
from hyper_parallel.backends.torch.planner.survey import list_ops, require_step
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import PolicyTable
from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.rules import INPUT, OpTable, RuleSet
from hyper_parallel.platform.torch import compat

__all__ = ["AppliedRules", "apply_rules"]

_POLICIES = {
    (Fate.SWAP, False): CheckpointPolicy.MUST_SWAP,
    (Fate.SAVE, False): CheckpointPolicy.MUST_SAVE,
    (Fate.RECOMPUTE, False): CheckpointPolicy.MUST_RECOMPUTE,
    (Fate.SAVE, True): CheckpointPolicy.PREFER_SAVE,
    (Fate.RECOMPUTE, True): CheckpointPolicy.PREFER_RECOMPUTE,
}  # by a rule's fate, and whether it is a preference


class RuledRegion(PolicyTable):
    """The checkpoint function of one block under rules; also its policy."""

    def __init__(
        self,
        block: str,
        rules: RuleSet,
        paths: ModulePaths | None,
        *,
        inner: tuple[str, ...],
        traced: Counter[tuple[str, str]],
    ) -> None:
        self.block = block
        self._inner = inner  # the paths of the modules inside
        self._seen_traced = traced
        self._rules = rules
        self._paths = paths  # None: all modules of the block get the same answers
        self._answers: dict[tuple[str, Any], tuple[CheckpointPolicy, tuple[str, str]]] = {}
        self._swaps_inputs = rules.rule_for(block, INPUT).fate is Fate.SWAP
        self.seen: Counter[tuple[str, str]] = Counter()
        self.was_called = False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block as a region."""
        self.was_called = True
        if torch.is_grad_enabled():
            self.seen[self.block, INPUT] += 1
        return checkpoint(function, *args, policy_fn=self, swap_inputs=self._swaps_inputs, **kwargs)

    def in_graph(self, label: str) -> InGraph:
        """The same in a traced graph."""
        policy = RulesInGraph(self._rules, self.block, self._inner, self._seen_traced)
        region = graph_region(policy, f"rules on {label}", swaps_inputs=self._swaps_inputs)
        return InGraph(region=region, bound={})

    def answers_for(self, op: Any) -> Callable[[], CheckpointPolicy]:
        """See the base class. Which module runs is known when the op runs."""
        return functools.partial(self._answer, op)

    def _answer(self, op: Any) -> CheckpointPolicy:
        path = self.block
        if self._paths is not None:
            stack = self._paths.stack
            path = stack[-1] if stack else self.block
        answer = self._answers.get((path, op))
        if answer is None:
            name = op_name(op)
            rule = self._rules.rule_for(path, name)
            answer = self._answers[path, op] = _POLICIES[rule.fate, rule.is_preference], (path, name)
        self.seen[answer[1]] += 1
        return answer[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_answers": {}}  # ops do not pickle, and the answers are found again


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
        return _POLICIES[rule.fate, rule.is_preference]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RulesInGraph) and self.seen is other.seen and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class AppliedRules(AppliedBlocks):
    """Rules on a model; ``stats()``, ``remove()``, or a ``with`` block."""

    def __init__(
        self,
        replacements: Replacements,
        rules: RuleSet,
        regions: Sequence[RuledRegion],
        paths: ModulePaths | None,
        traced: Counter[tuple[str, str]],
    ) -> None:
        super().__init__(replacements)
        self._traced = traced  # what traced graphs have asked; once for blocks that share a graph
        self._rules = rules
        self._regions = regions
        self._paths = paths
        self._check: Any = None  # torch.utils.hooks.RemovableHandle

    def check_at_first_forward(self, model: nn.Module) -> None:
        """Look, when the first forward ends, whether every rule matched something."""
        self._check = model.register_forward_hook(_FirstForward(self))

    def forward_ended(self) -> None:
        """Refuse, and take off, rules of which one matched nothing."""
        seen = self._seen()
        if not seen and (any(region.was_called for region in self._regions) or not torch.is_grad_enabled()):
            return  # without gradients no region asked
        self._end_check()
        try:
            if not seen:
                raise PlanError(self._no_block_was_called())
            if not self._rules.may_match_nothing:
                self._rules.check_matched(seen)
        except PlanError as error:
            self.remove()
            raise PlanError(f"{error} The rules were taken off the model.") from None

    def _no_block_was_called(self) -> str:
        names = [region.block for region in self._regions]
        inside = ".".join([*names[0].split(".")[:-1], "*", "*"])
        patterns = ", ".join(repr(rule.pattern) for rule in self._rules.rules)
        return (
            f"apply_rules: no rule matched anything ({patterns}), because this forward called "
            f"none of the model's {len(names)} blocks: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. "
            f"Name the modules that it does call, for example those inside: blocks={inside!r}."
        )

    def _end_check(self) -> None:
        if self._check is not None:
            self._check.remove()
            self._check = None

    def _seen(self) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for region in self._regions:
            total.update(region.seen)
        total.update(self._traced)
        return total

    def remove(self) -> None:
        """Put the model back as it was; nothing happens the second time."""
        self._end_check()
        if self._paths is not None:
            self._paths.remove()
        super().remove()

    def decided(self) -> Mapping[str, int]:
        """How many op instances each rule decided, by its pattern."""
        decided = {rule.pattern: 0 for rule in self._rules.rules}
        for (path, op), count in self._seen().items():
            number = self._rules.deciding(path, op)
            if number is not None:
                decided[self._rules.rules[number].pattern] += count
        return decided

    def num_undecided(self) -> int:
        """How many op instances no rule matched; they were recomputed."""
        return self._seen().total() - sum(self.decided().values())

    def __repr__(self) -> str:
        return f"<{len(self._rules.rules)} rules on {len(self._regions)} blocks>"


class _FirstForward:
    """The hook that checks; in a copy of the model, or a pickled one, it does nothing."""

    def __init__(self, handle: AppliedRules | None = None) -> None:
        self._handle = handle

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._handle is not None and not torch.compiler.is_dynamo_compiling():
            self._handle.forward_ended()

    def __reduce__(self) -> tuple[Any, ...]:
        return _FirstForward, ()


def apply_rules(
    model: Any, rules: RuleSet, *, blocks: str | Sequence[str] | None = None, step: Callable[[], Any] | None = None
) -> AppliedRules:
    """See ``hyper_parallel.apply_rules``."""
    who = "apply_rules"
    require_module(model, who)
    if step is not None:
        require_step(step, who)
    found = find_blocks(model, blocks, who=who) if step is None else find_blocks_of_step(model, blocks, step, who=who)
    if not rules.may_match_nothing:
        rules.check_modules(_module_paths(found))
        rules.check_op_names(_known_ops())
    if step is not None and not rules.may_match_nothing:
        table: OpTable = list_ops(model, step, blocks=blocks)
        rules.check_matched((row.module, row.op) for row in table)
    if rules.spares_last_block and len(found) > 1:
        found = found[:-1]
    paths = ModulePaths() if any(_depends_on_module(rules, block) for block in found) else None
    replacements = Replacements(model)
    traced: Counter[tuple[str, str]] = Counter()
    regions = [RuledRegion(block.name, rules, paths, inner=_inner_paths(block), traced=traced) for block in found]
    try:
        if paths is not None:
            # A traced graph says itself which module an op is in, and hooks would give each block a graph of its own.
            paths.watch(block for block in found if compat.compiler_of(block.module) is None)
        for block, region in zip(found, regions):
            replacements.wrap(block.name, block.module, region, may_be_in_graph=True)
    except BaseException:
        if paths is not None:
            paths.remove()
        replacements.restore()
        raise
    handle = AppliedRules(replacements, rules, regions, paths, traced)
    if step is None or rules.may_match_nothing:
        handle.check_at_first_forward(model)
    return handle


def _inner_paths(block: BlockRef) -> tuple[str, ...]:
    return tuple(path_in_block("", inner) for inner, _ in block.module.named_modules())


def _module_paths(blocks: Sequence[BlockRef]) -> list[str]:
    return [path_in_block(block.name, inner) for block in blocks for inner in _inner_paths(block)]


def _depends_on_module(rules: RuleSet, block: BlockRef) -> bool:
    """Whether two modules of one block may get different answers."""
    answers = {tuple(rule.matches_module(path) for rule in rules.rules) for path in _module_paths([block])}
    return len(answers) > 1


def _known_ops() -> list[str]:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return sorted(names)
