"""Budgets on blocks that are compiled one by one; what is compiled otherwise is refused by name.

Under the simulated accelerator the compiled code runs. With ``aot_eager`` its ops are seen one by one, so bytes are exact.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import hyper_parallel as hp
from hyper_parallel.backends.torch.compiled_calls import COMPILATIONS
from hyper_parallel.errors import CompileWarning, PlanError
from hyper_parallel.fates import Fate
from hyper_parallel.integrations.treatment import apply
from hyper_parallel.planner.by_hand import choices_by_hand
from hyper_parallel.planner.graph_limit import MOST_GRAPHS
from hyper_parallel.planner.plan import BlockPlan, OpDecision, Plan, Recipe, RegionPlan
from hyper_parallel.planner.profile import Profile
from hyper_parallel.testing import simulated_accelerator

from .models import LENGTH, WIDTH, Step, gradients, transformer, tree_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler's own
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
UP_BYTES = 4 * LENGTH * 4 * WIDTH * 4  # the output of a layer's ``mlp.up``
Compile = Callable[[nn.Module], None]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def as_modules(model: nn.Module, backend: str = "aot_eager") -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: str = "aot_eager") -> None:
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)


def forwards(model: nn.Module, backend: str = "aot_eager") -> None:
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)


def inner(model: nn.Module) -> None:
    model.layers[1].mlp.compile(backend="eager")


def around(model: nn.Module) -> None:
    model.compile(backend="eager")


WHOLE = [as_modules, in_place, forwards]


def compiled(compile_blocks: Compile = in_place, layers: int = 3) -> tuple[nn.Module, Step, dict[str, torch.Tensor]]:
    """A model without dropout, its step, and its gradients uncompiled."""
    model, step = transformer(layers)
    model.eval()
    wanted = gradients(model, step)
    compile_blocks(model)
    return model, step, wanted


def assert_gradients(model: nn.Module, step: Step, wanted: dict[str, torch.Tensor]) -> None:
    got = {name.replace("_orig_mod.", ""): grad for name, grad in gradients(model, step).items()}
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def budget_of(profile: Profile, share: float) -> int:
    base = profile.base.total
    return int(base + share * (profile.measured.peak_bytes - base))


# ---------------------------------------------------------------------- refusals

WAYS: dict[str, Callable[[nn.Module, Step], Any]] = {
    "fit_memory": lambda model, step: hp.fit_memory(model, step, "700KiB", steps=1),
    "profile_memory": lambda model, step: hp.profile_memory(model, step, steps=1),
    "list_ops": lambda model, step: hp.list_ops(model, step),
}
INNER = r"layers\.1\.mlp is compiled \(module\.compile\(\)\).*Compile the whole block"
AROUND = r"cannot measure layers\.0, because the model around it is compiled as one graph"
RULES: dict[str, Callable[[nn.Module, Step], Any]] = {
    "apply_rules": lambda model, step: hp.apply_rules(model, {"*::*": "recompute"}),
    "preset": lambda model, step: hp.apply_rules(model, "auto"),
}


@pytest.mark.parametrize(
    ("way", "compile_blocks", "said"),
    [
        *((way, inner, INNER) for way in (*WAYS, *RULES)),
        *((way, around, AROUND) for way in WAYS),
    ],
)
def test_what_is_compiled_otherwise_is_refused_by_name(way: str, compile_blocks: Compile, said: str) -> None:
    model, step = transformer(3)
    compile_blocks(model)
    tree = tree_of(model)
    with simulated_accelerator(), pytest.raises(PlanError, match=said):
        {**WAYS, **RULES}[way](model, step)
    assert tree_of(model) == tree
    assert float(model.forwards) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_plan_is_for_blocks_as_they_were_profiled() -> None:
    model, step = transformer(3)
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        plan = hp.plan_memory(profile, profile.measured.peak_bytes - 1, effort=0.1)
        assert not plan.does_nothing
        in_place(model)
        tree = tree_of(model)
        with pytest.raises(PlanError, match=r"layers\.\d.* is compiled \(module\.compile\(\)\)"):
            hp.apply_plan(model, plan)
        assert tree_of(model) == tree
        other, _ = transformer(3)
        of_compiled = kept_plan(model, [{}] * 3)
        with pytest.raises(PlanError, match=r"layers\.0, because it was made for a compiled block"):
            hp.apply_plan(other, of_compiled)


# ---------------------------------------------------------------------- profiles


@pytest.mark.parametrize("compile_blocks", WHOLE)
def test_a_profile_of_compiled_blocks(compile_blocks: Compile) -> None:
    """Its ops are those of the uncompiled block; what is kept is what the block's own graph saves. Nothing is left behind."""
    model, step, wanted = compiled(compile_blocks)
    tree, before = tree_of(model), float(model.forwards)
    plain, plain_step = transformer(3)
    plain.eval()
    with simulated_accelerator():
        table, profile = hp.list_ops(model, step), hp.profile_memory(model, step, steps=1)
        assert table == hp.list_ops(plain, plain_step)
        of_plain = hp.profile_memory(plain, plain_step, steps=1)
    assert tree_of(model) == tree
    assert float(model.forwards) == before
    assert [kind.name for kind in profile.kinds] == ["Layer"]
    kind, plain_kind = profile.kinds[0], of_plain.kinds[0]
    assert [(op.name, op.overload, op.output_bytes) for op in kind.ops] == [
        (op.name, op.overload, op.output_bytes) for op in plain_kind.ops
    ]
    assert len(kind.cuts) == 1
    assert kind.graph is not None
    assert kind.graph.compile_seconds > 0
    saved = {kind.ops[at].name for at in kind.graph.saves}
    assert {"native_layer_norm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"} <= saved
    by_hand = choices_by_hand(profile)
    assert {"every block recomputed, attention saved", "every block recomputed, attention saved, inputs swapped"} <= {
        *by_hand
    }
    assert not counters["graph_break"]
    assert_gradients(model, step, wanted)


def test_left_alone_is_predicted_as_it_is_measured() -> None:
    model, step, _ = compiled()
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        plan = hp.plan_memory(profile, 2 * profile.measured.peak_bytes)
    assert plan.does_nothing
    assert plan.predicted_peak_bytes == profile.measured.peak_bytes


# ---------------------------------------------------------------------- plans


def kept_plan(model: nn.Module, kept: list[dict[tuple[str, int], Fate]], *, input_fate: Fate = Fate.SAVE) -> Plan:
    """A plan by hand: for every layer the fates of ops that are kept."""
    with simulated_accelerator():
        ids = torch.zeros(1, 4, dtype=torch.long)
        profile = hp.profile_memory(model, lambda: model(ids).square().sum().backward(), steps=1)
        plan = hp.plan_memory(profile, "1GiB")
    recipes = tuple(
        Recipe(
            kind="Layer",
            regions=(
                RegionPlan(
                    module="",
                    input_fate=input_fate,
                    ops=tuple(
                        OpDecision(name=name, overload="default", module="", occurrence=at, fate=fate, reason="")
                        for (name, at), fate in fates.items()
                    ),
                ),
            ),
        )
        for fates in kept
    )
    blocks = tuple(BlockPlan(name=block.name, recipe=at, is_compiled=True) for at, block in enumerate(plan.blocks))
    values = {**vars(plan), "blocks": blocks, "recipes": recipes, "inputs": None}
    return Plan(**values)


def test_blocks_that_keep_the_same_ops_share_a_graph_whatever_they_swap() -> None:
    model, step, wanted = compiled()
    up, qkv = ("addmm", 2), ("addmm", 0)
    plan = kept_plan(
        model, [{up: Fate.SAVE, qkv: Fate.SWAP}, {up: Fate.SWAP, qkv: Fate.SAVE}, {up: Fate.SAVE, qkv: Fate.SAVE}]
    )
    with simulated_accelerator(), hp.configure(min_bytes=0, tail_bytes=0):
        before = COMPILATIONS.count
        with hp.apply_plan(model, plan) as applied:
            assert_gradients(model, step, wanted)
            assert applied.stats().swapped_out_bytes == UP_BYTES + 3 * UP_BYTES // 4
        assert COMPILATIONS.count == before + 1
    assert not counters["graph_break"]


def test_a_recompilation_for_other_shapes_keeps_the_fates() -> None:
    model, _, _ = compiled()
    plan = kept_plan(model, [{("addmm", 2): Fate.SWAP}] * 3)
    with simulated_accelerator(), hp.configure(min_bytes=0, tail_bytes=0), hp.apply_plan(model, plan) as applied:
        for length in (LENGTH, 7, 19):
            before = applied.stats().swapped_out_bytes
            model(torch.zeros(4, length, dtype=torch.long)).square().sum().backward()
            assert applied.stats().swapped_out_bytes - before == 3 * UP_BYTES // LENGTH * length


def test_a_graph_without_the_planned_ops_is_named() -> None:
    model, step, wanted = compiled()
    plan = kept_plan(model, [{("addmm", 2): Fate.SAVE, ("mm", 1): Fate.SAVE}] * 3)
    with simulated_accelerator(), hp.apply_plan(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_gradients(model, step, wanted)
    said = [str(one.message) for one in caught if issubclass(one.category, CompileWarning)]
    assert len(said) == 1
    assert "plan on Layer" in said[0]
    assert "has no mm#1. " in said[0]


@pytest.mark.parametrize("compile_blocks", [as_modules, in_place])
def test_a_budget_is_kept_on_compiled_blocks(compile_blocks: Compile) -> None:
    """Once it ended in ``AssertionError: every byte of the step is returned``."""
    model, step, wanted = compiled(compile_blocks)
    tree = tree_of(model)
    with simulated_accelerator(), hp.configure(min_bytes=0):
        profile = hp.profile_memory(model, step, steps=1)
        budget = budget_of(profile, 0.6)
        plan = hp.plan_memory(profile, budget, effort=0.05)
        applied = hp.fit_memory(model, step, budget, profile=profile, plan=plan, steps=1)
        assert applied.measured is not None
        assert applied.measured.peak_bytes <= budget
        assert all(block.is_compiled for block in applied.plan.blocks)
        graphs = {
            tuple((op.name, op.occurrence) for op in recipe.regions[0].ops if op.fate is not Fate.RECOMPUTE)
            for recipe in applied.plan.recipes
            if recipe.regions[0].is_replayed
        }
        assert len(graphs) <= MOST_GRAPHS
        assert "is compiled in " in applied.plan.summary()
        assert_gradients(model, step, wanted)
        applied.remove()
    assert tree_of(model) == tree
    assert not counters["graph_break"]
    assert_gradients(model, step, wanted)


def test_compiled_blocks_are_swapped_as_a_whole() -> None:
    model, step, _ = compiled(lambda model: None)
    model.layers[1].compile(backend="eager")
    wanted = gradients(model, step)
    with simulated_accelerator() as sim, apply(model, "swap"):
        got = gradients(model, step)
        assert sim.swapped_bytes > 0
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
