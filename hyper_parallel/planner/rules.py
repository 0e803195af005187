"""Rules: the user chooses what becomes of which op in which module.

A rule is ``"module::op": fate``. Rules are tried in the order they are written and the first that matches decides, so the
most specific come first and ``"*::*"`` comes last. This module knows patterns and names; it never sees a tensor.

The language
------------
*module*: a dotted path, from the model's root or from any module on the way (``layers.*.attn`` also means
``model.layers.3.attn``). ``*`` stands for one name or a part of one, ``**`` for any number of names. A pattern means the
module and everything inside it. ``*`` alone is every module.

*op*: the exact base name of an op (``mm``, ``addmm``, ``bmm``), an alias from :data:`ALIASES` (``matmul``, ``sdpa``), ``input``
(what goes into a block: it can be saved or swapped), or ``*`` (every op; not the input).

*fate*: ``swap``, ``save``, ``recompute``, and the preferences ``prefer_save`` and ``prefer_recompute``. What no rule matches is
recomputed, an input that no rule matches is saved.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.backend import AppliedRules, Model, Step, planner_backend

__all__ = ["ALIASES", "INPUT", "FATES", "PRESETS", "OpRow", "OpTable", "Rule", "RuleSet", "apply_rules", "list_ops"]

INPUT: Final = "input"


FATES: Final[Mapping[str, tuple[Fate, bool]]] = MappingProxyType(
    {
        "swap": (Fate.SWAP, False),
        "save": (Fate.SAVE, False),
        "recompute": (Fate.RECOMPUTE, False),
        "prefer_save": (Fate.SAVE, True),
        "prefer_recompute": (Fate.RECOMPUTE, True),
    }
)
"""What a user may write for an op's output: the fate, and whether it is a preference that a budget may overrule."""

_OF_INPUTS: Final = ("swap", "save", "prefer_save")

ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "matmul": (
            *("mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_addmm_activation"),
            *("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Dense", "Mm", "Addmm", "Addbmm", "Baddbmm"),
            "GroupedMatmul",
        ),
        "sdpa": (
            *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
            *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"),
            *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward", "flex_attention"),
            *("_flash_attn_forward", "_flash_attn_varlen_forward", "npu_fusion_attention"),
            *("FlashAttentionScore", "PromptFlashAttention", "IncreFlashAttention"),
        ),
        "norm": (
            *("native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm", "_fused_rms_norm"),
            *("LayerNorm", "LayerNormExt", "RmsNorm", "GroupNorm", "BatchNormExt"),
        ),
        "conv": ("convolution", "_convolution", "cudnn_convolution", "Conv1DExt", "Conv2D", "Conv2DExt", "Conv3DExt"),
        "activation": (
            *("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardswish", "mish"),
            *("ReLU", "GeLU", "GeluExt", "SiLU", "Sigmoid", "Tanh", "SoftplusExt", "LeakyReLUExt", "EluExt", "HSwish", "Mish"),
        ),
        "softmax": ("_softmax", "_log_softmax", "Softmax", "LogSoftmax", "LogSoftmaxExt"),
        "dropout": ("native_dropout", "bernoulli", "Dropout", "DropoutExt", "DropoutGenMaskExt", "DropoutDoMaskExt"),
    }
)  # fmt: skip
"""Names that stand for several ops, on both frameworks."""

PRESETS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        # Only what crosses from block to block survives, and that in far memory: the least memory without a budget.
        "boundary": {"*::input": "swap", "*::*": "recompute"},
        # Attention costs the most time per byte to run again on long sequences; its output and the boundary leave.
        "attention": {"*::input": "swap", "*::sdpa": "swap", "*::*": "recompute"},
        # Element-wise ops are run again at 1 to 2 % of the step; everything with a matmul in it stays.
        "elementwise": {"*::matmul": "save", "*::sdpa": "save", "*::conv": "save", "*::*": "recompute"},
        # The mix that the link hides in most decoders: boundary and attention leave, matmuls stay, the rest is run again.
        "auto": {"*::input": "swap", "*::sdpa": "swap", "*::matmul": "save", "*::conv": "save", "*::*": "recompute"},
    }
)
"""Rules by name; a rule of a preset may match nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One line: which ops, and their fate."""

    pattern: str
    fate: Fate
    is_preference: bool = False  # a budget may overrule it

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)
        if self.fate_word not in FATES:
            raise ValueError(
                f"apply_rules: the rule {self.pattern!r} cannot prefer {self.fate.value!r}; write it plainly"
            )
        if self.op == INPUT and self.fate_word not in _OF_INPUTS:
            raise ValueError(
                f"apply_rules: {self.pattern!r} cannot be {self.fate_word!r}: nothing makes a block's input again; "
                f"known for inputs are {', '.join(_OF_INPUTS)}"
            )

    @classmethod
    def parse(cls, pattern: Any, fate_word: Any) -> Rule:
        """From one line as a user writes it: ``"layers.*.attn::sdpa"`` and ``"swap"`` or ``"prefer_save"``."""
        _check_pattern(pattern)
        word = fate_word.value if isinstance(fate_word, Fate) else fate_word
        if not isinstance(word, str) or word not in FATES:
            raise ValueError(
                f"apply_rules: the rule {pattern!r} says {fate_word!r}; known fates are {', '.join(FATES)}"
                f"{_near(fate_word, FATES)}"
            )
        fate, is_preference = FATES[word]
        return cls(pattern=pattern, fate=fate, is_preference=is_preference)

    @property
    def fate_word(self) -> str:
        """The fate as users write it."""
        return f"prefer_{self.fate.value}" if self.is_preference else self.fate.value

    @property
    def module(self) -> str:
        """The part before ``::``."""
        return self.pattern.partition("::")[0]

    @property
    def op(self) -> str:
        """The part after ``::``."""
        return self.pattern.partition("::")[2]

    @property
    def ops(self) -> frozenset[str] | None:
        """The op names it means; None: every op."""
        return None if self.op == "*" else frozenset(ALIASES.get(self.op, (self.op,)))

    def matches_module(self, path: str) -> bool:
        """Whether it names the module at ``path``, or one around it."""
        return self.module == "*" or _covers(tuple(self.module.split(".")), tuple(path.split(".")) if path else ())

    def matches(self, path: str, op: str) -> bool:
        """Whether it names the op called ``op`` in the module at ``path``."""
        if op == INPUT or self.op == INPUT:
            return op == self.op and self.matches_module(path)
        ops = self.ops
        return (ops is None or op in ops) and self.matches_module(path)


def _check_pattern(pattern: Any) -> None:
    if not isinstance(pattern, str):
        raise TypeError(f"apply_rules: a rule is written 'module::op', got {pattern!r}")
    module, mark, op = pattern.partition("::")
    if not mark or not module.strip(".") or not op or "::" in op or module != module.strip("."):
        raise ValueError(
            f"apply_rules: cannot read the rule {pattern!r}; write 'module::op', such as 'layers.*.attn::sdpa', "
            "'layers.*.mlp::mm' or '*::*'"
        )


@functools.lru_cache(maxsize=65536)
def _covers(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Whether some consecutive names of ``path`` are the pattern's: what follows them is inside that module."""
    return any(_covers_from(pattern, path[start:]) for start in range(len(path)))


def _covers_from(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_covers_from(pattern[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _covers_from(pattern[1:], path[1:])


def _near(word: Any, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=4, cutoff=0.55)
    return f"; near misses: {', '.join(close)}" if close else ""


_INPUT_WITHOUT_RULE: Final = Rule(pattern="*::input", fate=Fate.SAVE)
_OP_WITHOUT_RULE: Final = Rule(pattern="*::*", fate=Fate.RECOMPUTE, is_preference=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """Rules in order; the first that matches decides."""

    rules: tuple[Rule, ...]
    may_match_nothing: bool = False

    @classmethod
    def read(cls, given: Any) -> RuleSet:
        """From a mapping of patterns to fates, or the name of a preset."""
        if isinstance(given, RuleSet):
            return given
        if isinstance(given, str):
            if given not in PRESETS:
                raise ValueError(
                    f"apply_rules: unknown preset {given!r}; known are {', '.join(PRESETS)}{_near(given, PRESETS)}"
                )
            return cls(
                rules=tuple(Rule.parse(pattern, word) for pattern, word in PRESETS[given].items()),
                may_match_nothing=True,
            )
        if not isinstance(given, Mapping):
            raise TypeError(
                "apply_rules: rules are a mapping such as {'layers.*.attn::sdpa': 'swap', '*::*': 'prefer_save'} or the name "
                f"of a preset ({', '.join(PRESETS)}), got {given!r}"
            )
        if not given:
            raise ValueError("apply_rules: no rules were given; '*::*' with a fate is the shortest rule there is")
        return cls(rules=tuple(Rule.parse(pattern, word) for pattern, word in given.items()))

    @property
    def spares_last_block(self) -> bool:
        """Whether the block that backward needs first is left alone: so in presets that save outputs of ops.

        A region's replay makes its values again beside what it saved. In the last block everything is still there at that
        moment, so replaying it would lift the peak above that of the plain step. Rules of a user's own do what they say.
        """
        return self.may_match_nothing and any(rule.fate is Fate.SAVE and rule.op != INPUT for rule in self.rules)

    def deciding(self, path: str, op: str) -> int | None:
        """The number of the rule that decides; None where no rule matches."""
        for number, rule in enumerate(self.rules):
            if rule.matches(path, op):
                return number
        return None

    def rule_for(self, path: str, op: str) -> Rule:
        """The rule that decides about an op, or about an input; where none matches, what holds without rules."""
        number = self.deciding(path, op)
        if number is not None:
            return self.rules[number]
        return _INPUT_WITHOUT_RULE if op == INPUT else _OP_WITHOUT_RULE

    def matching(self, path: str, op: str) -> list[int]:
        """Every rule that names this op, also those that an earlier one overrules."""
        return [number for number, rule in enumerate(self.rules) if rule.matches(path, op)]

    def check_modules(self, paths: Sequence[str]) -> None:
        """Refuse a rule whose module pattern matches none of these."""
        for rule in self.rules:
            if not any(rule.matches_module(path) for path in paths):
                raise PlanError(
                    f"apply_rules: no module in the model's blocks is called {rule.module!r} (rule {rule.pattern!r})"
                    f"{_near(rule.module, _suffixes(paths))}. Look at hp.list_ops(model, step) for what there is."
                )

    def check_op_names(self, known: Sequence[str]) -> None:
        """Refuse a rule that names an op which does not exist."""
        names = [*ALIASES, INPUT, *known]
        aliased = {name for members in ALIASES.values() for name in members}
        for rule in self.rules:
            if (
                rule.op not in ("*", INPUT)
                and rule.op not in ALIASES
                and rule.op not in known
                and rule.op not in aliased
            ):
                raise PlanError(
                    f"apply_rules: there is no op called {rule.op!r} (rule {rule.pattern!r}); op names are exact base names, "
                    f"without namespace or overload, or one of {', '.join(ALIASES)}{_near(rule.op, names)}"
                )

    def check_matched(self, seen: Iterable[tuple[str, str]]) -> None:
        """Refuse a rule that names none of the (module, op) pairs that ran."""
        seen = sorted(set(seen))
        for number, rule in enumerate(self.rules):
            if any(number in self.matching(path, op) for path, op in seen):
                continue
            here = sorted({op for path, op in seen if rule.matches_module(path)})
            where = sorted({path for path, op in seen if rule.ops is None or op in rule.ops})
            hints = []
            if here:
                hints.append(f"modules like {rule.module!r} ran {', '.join(here[:12])}")
            if where:
                hints.append(f"{rule.op!r} ran in {', '.join(where[:6])}")
            raise PlanError(
                f"apply_rules: the rule {rule.pattern!r} matched nothing in this step; {'; '.join(hints) or 'no op ran there'}"
                f"{_near(rule.op, here)}. Look at hp.list_ops(model, step) for what there is."
            )


def _suffixes(paths: Iterable[str]) -> list[str]:
    found: set[str] = set()
    for path in paths:
        names = path.split(".")
        found.update(".".join(names[start:]) for start in range(len(names)))
    return sorted(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpRow:
    """One op of one module: how often it ran in a step, and what it made."""

    module: str
    op: str
    count: int
    output_bytes: int


@dataclasses.dataclass(frozen=True)
class OpTable(Sequence[OpRow]):
    """Every op that a rule can name; prints as a table."""

    rows: tuple[OpRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self.rows[at]

    def __iter__(self) -> Iterator[OpRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [("module", "op", "count", "bytes")]
        lines += [(row.module, row.op, str(row.count), f"{row.output_bytes:,}") for row in self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            f"{module:<{widths[0]}}  {op:<{widths[1]}}  {count:>{widths[2]}}  {nbytes:>{widths[3]}}"
            for module, op, count, nbytes in lines
        )


def apply_rules(
    model: Model,
    rules: Mapping[str, str] | str,
    *,
    blocks: str | Sequence[str] | None = None,
    step: Step | None = None,
) -> AppliedRules:
    """Let rules decide what becomes of every op in the model's blocks.

    Args:
        model: a model with repeated blocks.
        rules: ``{"layers.*.attn::sdpa": "swap", "layers.*.mlp::mm": "recompute", "*::*": "prefer_save"}``, first match
            first, or a preset: ``boundary``, ``attention``, ``elementwise``, ``auto``.
        blocks: patterns of the modules to make regions of; None: the model's repeated blocks.
        step: when given, it is run once, without a trace, to check that every rule matches something. Without it names are
            checked now and matches at the end of the first forward. A preset needs no check, and does not run it.

    Returns:
        What was applied: a context manager with ``stats()``, ``decided()`` and ``remove()``.

    Raises:
        PlanError: a rule matches nothing (near misses are shown), or the model has no repeated blocks.
        ValueError, TypeError: rules that cannot be read.
    """
    return planner_backend().apply_rules(model, RuleSet.read(rules), blocks=blocks, step=step)


def list_ops(model: Model, step: Step, *, blocks: str | Sequence[str] | None = None) -> OpTable:
    """Every op that a rule can name: module path, op name, how often it ran in one step, the bytes it made.

    ``step`` runs once and leaves no trace.
    """
    return planner_backend().list_ops(model, step, blocks=blocks)
