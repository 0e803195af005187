"""Patterns, order, presets and errors of the rules' language."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.planner.rules import ALIASES, INPUT, PRESETS, OpRow, OpTable, Rule, RuleSet

PATHS = ["layers.0", "layers.0.attn", "layers.0.attn.qkv", "layers.0.mlp", "layers.0.mlp.gate"]


@pytest.mark.parametrize(
    ("pattern", "path", "op", "matches"),
    [
        ("layers.*.attn::sdpa", "layers.3.attn", "_scaled_dot_product_flash_attention", True),
        ("layers.*.attn::sdpa", "model.layers.3.attn", "_scaled_dot_product_efficient_attention", True),
        ("layers.*.attn::sdpa", "layers.3.attn", "mm", False),
        ("layers.*.attn::sdpa", "layers.3.mlp", "_scaled_dot_product_flash_attention", False),
        ("layers.*.attn::FlashAttentionScore", "layers.3.attn", "FlashAttentionScore", True),
        ("layers.*.mlp::mm", "layers.3.mlp.gate", "mm", True),  # a module means everything inside it
        ("layers.*.mlp::mm", "layers.3.mlp.gate", "bmm", False),  # names are exact
        ("layers.*.mlp::matmul", "layers.3.mlp.gate", "bmm", True),
        ("layers.*.mlp::matmul", "layers.3.mlp.gate", "BatchMatMul", True),
        ("layers.1.mlp::*", "layers.10.mlp", "mm", False),
        ("layers.1*.mlp::*", "layers.10.mlp", "mm", True),
        ("layers.**.gate::*", "layers.3.mlp.experts.4.gate", "mm", True),
        ("layers.**.gate::*", "layers.3.gate", "mm", True),
        ("gate::*", "layers.3.mlp.gate", "mm", True),
        ("gat::*", "layers.3.mlp.gate", "mm", False),
        ("*::*", "", "mm", True),
        ("*::*", "layers.3", INPUT, False),  # an input is no op
        ("*::input", "layers.3", INPUT, True),
        ("layers.0::input", "layers.3", INPUT, False),
        ("*::input", "layers.3", "mm", False),
    ],
)  # fmt: skip
def test_what_a_rule_names(pattern: str, path: str, op: str, matches: bool) -> None:
    assert Rule(pattern=pattern, fate=Fate.SAVE).matches(path, op) is matches


def test_the_first_match_decides() -> None:
    rules = RuleSet.read({"layers.0.attn::mm": "swap", "*::mm": "recompute", "*::*": "prefer_save"})
    assert rules.rule_for("layers.0.attn.qkv", "mm").fate_word == "swap"
    assert rules.rule_for("layers.1.attn.qkv", "mm").fate_word == "recompute"
    assert rules.rule_for("layers.1.attn", "add").fate_word == "prefer_save"
    other_order = RuleSet.read({"*::mm": "recompute", "layers.0.attn::mm": "swap"})
    assert other_order.rule_for("layers.0.attn.qkv", "mm").fate_word == "recompute"


@pytest.mark.parametrize(
    ("word", "fate", "is_preference"),
    [
        ("swap", Fate.SWAP, False),
        ("save", Fate.SAVE, False),
        ("recompute", Fate.RECOMPUTE, False),
        ("prefer_save", Fate.SAVE, True),
        ("prefer_recompute", Fate.RECOMPUTE, True),
        (Fate.SWAP, Fate.SWAP, False),
    ],
)
def test_the_words_of_users_become_a_fate_and_a_strength(word: str, fate: Fate, is_preference: bool) -> None:
    rule = Rule.parse("*::mm", word)
    assert (rule.fate, rule.is_preference) == (fate, is_preference)
    assert rule.fate_word == (word.value if isinstance(word, Fate) else word)


def test_no_rule_can_prefer_a_swap() -> None:
    with pytest.raises(ValueError, match=r"'\*::mm' cannot prefer 'swap'"):
        Rule(pattern="*::mm", fate=Fate.SWAP, is_preference=True)


def test_what_no_rule_matches_is_recomputed_and_its_input_saved() -> None:
    rules = RuleSet.read({"*::mm": "swap"})
    assert rules.deciding("layers.0", "add") is None
    assert rules.rule_for("layers.0", "add").fate_word == "prefer_recompute"
    assert rules.rule_for("layers.0", INPUT).fate_word == "save"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_and_may_match_nothing(name: str) -> None:
    rules = RuleSet.read(name)
    assert rules.may_match_nothing
    assert [rule.pattern for rule in rules.rules] == list(PRESETS[name])


def test_presets_say_what_their_names_say() -> None:
    sdpa, matmul = "_scaled_dot_product_flash_attention", "mm"
    fates = {
        name: [RuleSet.read(name).rule_for("layers.0", op).fate_word for op in (INPUT, sdpa, matmul, "silu")]
        for name in PRESETS
    }
    assert fates == {
        "boundary": ["swap", "recompute", "recompute", "recompute"],
        "attention": ["swap", "swap", "recompute", "recompute"],
        "elementwise": ["save", "save", "save", "recompute"],
        "auto": ["swap", "swap", "save", "recompute"],
    }


def test_aliases_name_ops_once() -> None:
    members = [name for names in ALIASES.values() for name in names]
    assert len(members) == len(set(members))
    assert not set(members) & set(ALIASES)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"layers": "swap"}, ValueError, r"cannot read the rule 'layers'; write 'module::op'"),
        ({"::mm": "swap"}, ValueError, r"cannot read the rule '::mm'"),
        ({"a::": "swap"}, ValueError, r"cannot read the rule 'a::'"),
        ({"a::b::c": "swap"}, ValueError, r"cannot read the rule 'a::b::c'"),
        ({".a::mm": "swap"}, ValueError, r"cannot read the rule '\.a::mm'"),
        ({"a::mm": "swop"}, ValueError, r"says 'swop'; known fates are swap, save, .*near misses: swap"),
        ({"a::mm": None}, ValueError, r"says None; known fates"),
        ({"a::input": "recompute"}, ValueError, r"nothing makes a block's input again"),
        ({3: "swap"}, TypeError, r"a rule is written 'module::op', got 3"),
        ({}, ValueError, r"no rules were given"),
        ("atention", ValueError, r"unknown preset 'atention'; known are boundary, attention, .*near misses: attention"),
        (7, TypeError, r"rules are a mapping such as .* or the name of a preset .*, got 7"),
        (None, TypeError, r"rules are a mapping"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_read(given: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        RuleSet.read(given)


def test_a_module_that_is_not_there() -> None:
    rules = RuleSet.read({"layers.*.atn::mm": "swap"})
    with pytest.raises(PlanError, match=r"no module .* is called 'layers\.\*\.atn' .*near misses: .*layers\.0\.attn"):
        rules.check_modules(PATHS)
    RuleSet.read({"layers.*.attn::mm": "swap", "*::*": "save"}).check_modules(PATHS)


def test_an_op_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"no op called 'addm' .*near misses: .*addmm"):
        RuleSet.read({"*::addm": "swap"}).check_op_names(["mm", "addmm"])
    RuleSet.read(
        {"*::mm": "swap", "*::sdpa": "swap", "*::FlashAttentionScore": "swap", "*::input": "swap"}
    ).check_op_names(["mm", "addmm"])


def test_a_rule_that_matched_nothing_shows_what_ran() -> None:
    rules = RuleSet.read({"layers.*.attn::silu": "swap", "*::*": "save"})
    with pytest.raises(
        PlanError, match=r"'layers\.\*\.attn::silu' matched nothing .* ran mm; 'silu' ran in layers\.0\.mlp"
    ):
        rules.check_matched([("layers.0.attn.qkv", "mm"), ("layers.0.mlp", "silu")])


def test_a_rule_that_an_earlier_one_overrules_has_matched() -> None:
    RuleSet.read({"*::*": "save", "layers.*.mlp::silu": "swap"}).check_matched([("layers.0.mlp", "silu")])


def test_the_table_of_ops_prints_in_columns() -> None:
    table = OpTable((OpRow(module="layers.0", op="mm", count=3, output_bytes=4096),))
    assert len(table) == 1
    assert table[0].op == "mm"
    assert str(table).splitlines() == ["module    op  count  bytes", "layers.0  mm      3  4,096"]
