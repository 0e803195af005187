"""Compiled blocks are refused by name where single ops are measured, and where only a part of a block is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.treatment import apply
from hyper_parallel.testing import simulated_accelerator

from .models import Step, gradients, transformer, tree_of


def compile_blocks(model: nn.Module) -> None:
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="eager")


def compile_in_place(model: nn.Module) -> None:
    model.layers[1].compile(backend="eager")


def compile_inner(model: nn.Module) -> None:
    model.layers[1].mlp.compile(backend="eager")


def compile_forward(model: nn.Module) -> None:
    model.layers[1].forward = torch.compile(model.layers[1].forward, backend="eager")


WAYS: dict[str, Callable[[nn.Module, Step], Any]] = {
    "fit_memory": lambda model, step: hp.fit_memory(model, step, "700KiB", steps=1),
    "profile_memory": lambda model, step: hp.profile_memory(model, step, steps=1),
    "list_ops": lambda model, step: hp.list_ops(model, step),
}
RULES: dict[str, Callable[[nn.Module, Step], Any]] = {
    "apply_rules": lambda model, step: hp.apply_rules(model, {"*::*": "recompute"}),
    "preset": lambda model, step: hp.apply_rules(model, "auto"),
}
WHOLE = [compile_blocks, compile_in_place, compile_forward]


@pytest.mark.parametrize(
    ("way", "compiled"),
    [(way, compiled) for way in WAYS for compiled in (*WHOLE, compile_inner)] + [(way, compile_inner) for way in RULES],
)
def test_a_compiled_block_is_refused_by_name(way: str, compiled: Callable[[nn.Module], None]) -> None:
    model, step = transformer(3)
    compiled(model)
    tree = tree_of(model)
    with (
        simulated_accelerator(),
        pytest.raises(PlanError, match=r"layers\.[01].* is compiled .*hp\.swap_wrapper\(block\)"),
    ):
        {**WAYS, **RULES}[way](model, step)
    assert tree_of(model) == tree
    assert float(model.forwards) == 0
    assert all(p.grad is None for p in model.parameters())


def test_a_plan_made_before_compiling_is_refused_after() -> None:
    model, step = transformer(3)
    with simulated_accelerator():
        profile = hp.profile_memory(model, step, steps=1)
        plan = hp.plan_memory(profile, profile.measured.peak_bytes - 1, effort=0.1)
        assert not plan.does_nothing
        for layer in model.layers:
            layer.compile(backend="eager")
        tree = tree_of(model)
        with pytest.raises(PlanError, match=r"layers\.\d.* is compiled \(module\.compile\(\)\)"):
            hp.apply_plan(model, plan)
    assert tree_of(model) == tree


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_compiled_blocks_are_swapped_as_a_whole() -> None:
    model, step = transformer(3)
    model.eval()  # dropout draws its numbers elsewhere when compiled
    compile_in_place(model)
    wanted = gradients(model, step)
    with simulated_accelerator() as sim, apply(model, "swap"):
        got = gradients(model, step)
        assert sim.swapped_bytes > 0
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
