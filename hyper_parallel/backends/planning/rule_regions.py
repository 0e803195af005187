"""Rules applied: a region in the place of every block, whose policy asks the rules by module path and op name."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hyper_parallel.backends.planning.blocks import module_paths
from hyper_parallel.backends.planning.framework import Framework
from hyper_parallel.backends.planning.module_paths import ModulePaths, path_in_block
from hyper_parallel.backends.planning.module_tree import BlockRef, Module
from hyper_parallel.backends.planning.replacements import AppliedBlocks, Replacements
from hyper_parallel.core.activation_checkpoint.activation_checkpoint import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.policy import PolicyTable
from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.rules import INPUT, OpTable, RuleSet

__all__ = ["AppliedRules", "POLICIES", "RuledRegion", "apply_rules_to"]

POLICIES = {
    (Fate.SWAP, False): CheckpointPolicy.MUST_SWAP,
    (Fate.SAVE, False): CheckpointPolicy.MUST_SAVE,
    (Fate.RECOMPUTE, False): CheckpointPolicy.MUST_RECOMPUTE,
    (Fate.SAVE, True): CheckpointPolicy.PREFER_SAVE,
    (Fate.RECOMPUTE, True): CheckpointPolicy.PREFER_RECOMPUTE,
}  # by a rule's fate, and whether it is a preference


class RuledRegion(PolicyTable):
    """The checkpoint function of one block under rules; also its policy."""

    framework: ClassVar[Framework]

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
        self._traced = traced  # what graphs ask while they are traced; one for all blocks
        self._rules = rules
        self._paths = paths  # None: all modules of the block get the same answers
        self._answers: dict[tuple[str, Any], tuple[CheckpointPolicy, tuple[str, str]]] = {}
        self._swaps_inputs = rules.rule_for(block, INPUT).fate is Fate.SWAP
        self.seen: Counter[tuple[str, str]] = Counter()
        self.was_called = False

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block as a region."""
        self.was_called = True
        if self.framework.is_recording():
            self.seen[self.block, INPUT] += 1
        return self.framework.checkpoint(function, *args, policy_fn=self, swap_inputs=self._swaps_inputs, **kwargs)

    def answers_for(self, op: Any) -> Callable[[], CheckpointPolicy]:
        """See the base class. Which module runs is known when the op runs."""
        return functools.partial(self._answer, op)

    def _answer(self, op: Any) -> CheckpointPolicy:
        path = self.block
        if self._paths is not None:
            stack = self._paths.stack
            path = stack[-1] if stack else self.block
        key = self._key(op)
        answer = self._answers.get((path, key))
        if answer is None:
            name = self.framework.op_name(op)
            rule = self._rules.rule_for(path, name)
            answer = self._answers[path, key] = POLICIES[rule.fate, rule.is_preference], (path, name)
        self.seen[answer[1]] += 1
        return answer[0]

    def _key(self, op: Any) -> Any:
        """What tells the op from others."""
        return op

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_answers": {}}  # ops do not pickle, and the answers are found again


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
        self._check: Any = None  # the framework's handle of a hook

    def check_at_first_forward(self, model: Module) -> None:
        """Look, when the first forward ends, whether every rule matched something."""
        self._check = model.register_forward_hook(_FirstForward(self, self._regions[0].framework.is_compiling))

    def forward_ended(self) -> None:
        """Refuse, and take off, rules of which one matched nothing."""
        seen = self._seen()
        if not seen and (
            any(region.was_called for region in self._regions) or not self._regions[0].framework.is_recording()
        ):
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

    def __init__(self, handle: AppliedRules | None = None, is_compiling: Callable[[], bool] | None = None) -> None:
        self._handle = handle
        self._is_compiling = is_compiling

    def __call__(self, module: Module, args: Any, output: Any) -> None:
        if self._handle is not None and self._is_compiling is not None and not self._is_compiling():
            self._handle.forward_ended()

    def __reduce__(self) -> tuple[Any, ...]:
        return _FirstForward, ()


def apply_rules_to(
    model: Module,
    rules: RuleSet,
    found: Sequence[BlockRef],
    *,
    region_class: type[RuledRegion],
    list_ops: Callable[[], OpTable] | None,
) -> AppliedRules:
    """Put regions in the place of these blocks. ``list_ops`` runs a step and says what it ran; None: there is no step."""
    framework = region_class.framework
    if not rules.may_match_nothing:
        rules.check_modules(module_paths(framework.tree, found))
        known = framework.known_ops()
        if known is not None:
            rules.check_op_names(known)
        if list_ops is not None:
            rules.check_matched((row.module, row.op) for row in list_ops())
    if rules.spares_last_block and len(found) > 1:
        found = found[:-1]
    depends = any(_depends_on_module(framework, rules, block) for block in found)
    paths = ModulePaths(framework.is_compiling) if depends else None
    replacements = Replacements(framework, model)
    traced: Counter[tuple[str, str]] = Counter()
    regions = [
        region_class(block.name, rules, paths, inner=_inner_paths(framework, block), traced=traced) for block in found
    ]
    try:
        if paths is not None:
            # A traced graph says itself which module an op is in, and hooks would give each block a graph of its own.
            paths.watch(framework.tree, (block for block in found if not framework.is_compiled_whole(block.module)))
        for block, region in zip(found, regions):
            replacements.wrap(block.name, block.module, region, may_be_in_graph=True)
    except BaseException:
        if paths is not None:
            paths.remove()
        replacements.restore()
        raise
    handle = AppliedRules(replacements, rules, regions, paths, traced)
    if list_ops is None or rules.may_match_nothing:
        handle.check_at_first_forward(model)
    return handle


def _inner_paths(framework: Framework, block: BlockRef) -> tuple[str, ...]:
    return tuple(path_in_block("", inner) for inner, _ in framework.tree.named(block.module))


def _depends_on_module(framework: Framework, rules: RuleSet, block: BlockRef) -> bool:
    """Whether two modules of one block may get different answers."""
    paths = module_paths(framework.tree, [block])
    return len({tuple(rule.matches_module(path) for rule in rules.rules) for path in paths}) > 1
