"""Rules on a model: bitwise gradients, the fates that were asked for, errors that leave the model alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.wrappers import CheckpointWrapper
from hyper_parallel.errors import PlanError
from hyper_parallel.planner.rules import PRESETS
from hyper_parallel.testing import simulated_accelerator

from .fused import encoder
from .models import BATCH, FAMILIES, LENGTH, WIDTH, assert_same, gradients, transformer, tree_of

MIXED = {"layers.*.attn::sdpa": "swap", "layers.*.mlp::addmm": "recompute", "*::input": "swap", "*::*": "prefer_save"}
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
ACTIVATION = BATCH * LENGTH * WIDTH * 4  # bytes of one [batch, length, width] in float32


@pytest.mark.parametrize("rules", [*PRESETS, {"*::sdpa": "swap"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bitwise_those_of_the_plain_step(family: str, rules: Any) -> None:
    model, step = FAMILIES[family]()
    wanted = gradients(model, step)
    before = tree_of(model)
    if not isinstance(rules, str) and family == "gpt2":
        rules = {"*::matmul": "swap"}  # dropout inside attention is not the fused kernel's on CPU
    with simulated_accelerator() as sim:
        with hp.apply_rules(model, rules) as applied:
            got = gradients(model, step)
            decided = applied.decided()
        assert_same(got, wanted)
        if rules != "elementwise":
            assert sim.swapped_bytes > 0
    assert sum(decided.values()) > 0
    assert tree_of(model) == before


def test_each_rule_decides_what_it_names() -> None:
    model, step = transformer()
    wanted = gradients(model, step)
    with simulated_accelerator():
        with hp.apply_rules(model, MIXED) as applied:
            got = gradients(model, step)
            stats, decided, num_undecided = applied.stats(), applied.decided(), applied.num_undecided()
    assert_same(got, wanted)
    assert decided["layers.*.attn::sdpa"] == 4
    assert decided["layers.*.mlp::addmm"] == 8
    assert decided["*::input"] == 4
    assert num_undecided == 0
    # Of each layer: the input, and attention's output with its log-sum-exp (one number per head and token).
    attention = ACTIVATION + BATCH * LENGTH * 4 * 4
    assert stats.swapped_out_bytes == 4 * (ACTIVATION + attention)


def test_nothing_is_left_after_remove() -> None:
    model, step = transformer()
    before, keys = tree_of(model), list(model.state_dict())
    applied = hp.apply_rules(model, MIXED)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == list(before)
    step()
    applied.remove()
    applied.remove()
    assert tree_of(model) == before
    step()


def test_a_model_under_rules_is_copied_and_pickled() -> None:
    model, _ = transformer()
    with simulated_accelerator(), hp.apply_rules(model, MIXED):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    ids = torch.ones(2, 5, dtype=torch.long)
    wanted = model.eval()(ids)
    for twin in copies:
        assert torch.equal(twin.eval()(ids), wanted)
        twin.train()(ids).sum().backward()
        assert all(p.grad is not None for p in twin.parameters())


def test_a_rule_that_matches_nothing_is_found_at_the_end_of_the_first_forward() -> None:
    model, step = transformer()
    before = tree_of(model)
    hp.apply_rules(model, {"layers.*.attn::convolution": "swap", "*::*": "save"})
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))  # no region asks here, so nothing is known yet
    with pytest.raises(PlanError, match=r"'layers\.\*\.attn::convolution' matched nothing .*taken off the model"):
        step()
    assert tree_of(model) == before
    step()


class _CallsTheInsides(nn.Module):
    """Its blocks can be called, and are not: it calls what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer[0](x)
        return x


@pytest.mark.parametrize("rules", [{"*::addmm": "save", "*::*": "recompute"}, "auto"], ids=["rules", "preset"])
def test_rules_on_blocks_that_are_never_called_are_said_to_do_nothing(rules: Any) -> None:
    model, x = _CallsTheInsides(), torch.randn(2, 4)
    before = tree_of(model)
    hp.apply_rules(model, rules)
    with torch.no_grad():
        model(x)
    with pytest.raises(
        PlanError, match=r"none of the model's \d blocks: layers\.0, .*blocks='layers\.\*\.\*'.*taken off"
    ):
        model(x)
    assert tree_of(model) == before
    with hp.apply_rules(model, rules, blocks="layers.*.*") as handle:
        model(x).sum().backward()
        assert sum(handle.decided().values()) > 0


def test_rules_on_a_list_of_dicts_decide() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4), nn.ReLU())}) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer["mlp"](x)
            return x

    model, x = Model(), torch.randn(2, 4)
    with hp.apply_rules(model, {"layers.*.mlp::addmm": "save", "*::*": "recompute"}) as handle:
        model(x).sum().backward()
        assert handle.decided()["layers.*.mlp::addmm"] == 3


def test_with_a_step_the_same_is_found_at_once() -> None:
    model, step = transformer()
    before, forwards = tree_of(model), model.forwards.clone()
    with pytest.raises(PlanError, match=r"'layers\.\*\.mlp::sdpa' matched nothing .*'sdpa' ran in layers\.0\.attn"):
        hp.apply_rules(model, {"layers.*.mlp::sdpa": "swap", "*::*": "save"}, step=step)
    assert tree_of(model) == before
    assert torch.equal(model.forwards, forwards)
    assert all(p.grad is None for p in model.parameters())
    with hp.apply_rules(model, MIXED, step=step):
        step()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"layers.*.atn::mm": "swap"}, r"no module in the model's blocks is called 'layers\.\*\.atn'.*near misses"),
        ({"head::mm": "swap"}, r"no module in the model's blocks is called 'head'"),
        ({"*::addmmm": "swap"}, r"no op called 'addmmm'.*near misses: .*addmm"),
    ],
)
def test_a_name_that_does_not_exist_is_found_at_once(rules: dict[str, str], text: str) -> None:
    model, _ = transformer()
    before = tree_of(model)
    with pytest.raises(PlanError, match=text):
        hp.apply_rules(model, rules)
    assert tree_of(model) == before


@pytest.mark.parametrize("rules", ["boundary", {"*::*": "recompute"}], ids=["preset", "rules"])
def test_a_step_that_cannot_be_called_is_refused(rules: Any) -> None:
    model, _ = transformer()
    tree = tree_of(model)
    with pytest.raises(TypeError, match=r"apply_rules: step must be a callable"):
        hp.apply_rules(model, rules, step="train.py")  # type: ignore[arg-type]
    assert tree_of(model) == tree


def test_blocks_by_pattern() -> None:
    model, step = transformer()
    with simulated_accelerator():
        with hp.apply_rules(model, {"*::input": "swap", "*::*": "recompute"}, blocks="layers.*.mlp") as applied:
            step()
            stats, decided = applied.stats(), applied.decided()
    assert decided["*::input"] == 4
    assert stats.swapped_out_bytes == 4 * ACTIVATION


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("layers", "activation"), [(2, "relu"), (4, "relu"), (4, "gelu")])
def test_no_preset_peaks_above_the_plain_step(preset: str, layers: int, activation: str) -> None:
    """Without dropout an encoder's layers keep little that is not a matmul's output."""
    peaks = []
    for rules in (None, preset):
        model, step = encoder(layers, dropout=0.0, activation=activation)
        with simulated_accelerator() as sim:
            if rules is not None:
                hp.apply_rules(model, rules)
            for _ in range(2):
                step()
            peaks.append(sim.peak_bytes)
    assert peaks[1] <= peaks[0]


def test_presets_that_save_leave_the_last_block_alone_and_rules_of_ones_own_do_not() -> None:
    model, _ = transformer()
    for rules, count in (
        ("auto", 3),
        ("elementwise", 3),
        ("boundary", 4),
        ("attention", 4),
        (dict(PRESETS["auto"]), 4),
    ):
        with hp.apply_rules(model, rules):
            wrapped = [name for name, module in enumerate(model.layers) if type(module) is CheckpointWrapper]
            assert wrapped == list(range(count))
    with hp.apply_rules(model, "auto", blocks="layers.1"):
        assert type(model.layers[1]) is CheckpointWrapper


def test_list_ops_counts_what_ran() -> None:
    model, step = transformer()
    model.eval()  # dropout is of no account here
    table = hp.list_ops(model, step)
    rows = {(row.module, row.op): row for row in table}
    assert rows["layers.0", "input"].output_bytes == ACTIVATION
    assert rows["layers.3.attn.qkv", "addmm"].output_bytes == 3 * ACTIVATION
    assert rows["layers.2.mlp.up", "addmm"].count == 1
    assert rows["layers.2.mlp", "gelu"].output_bytes == 4 * ACTIVATION
    assert rows["layers.1.attn", SDPA].count == 1
    assert not any(row.module.startswith(("embed", "head")) for row in table)
    assert str(table).splitlines()[0].split() == ["module", "op", "count", "bytes"]


def test_list_ops_leaves_no_trace() -> None:
    model, step = transformer()
    step()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    tree, forwards, state = tree_of(model), model.forwards.clone(), torch.get_rng_state()
    hp.list_ops(model, step)
    assert tree_of(model) == tree
    assert torch.equal(model.forwards, forwards)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same({name: p.grad for name, p in model.named_parameters()}, before)


def test_list_ops_needs_a_backward() -> None:
    model, _ = transformer()
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(PlanError, match=r"never ran a backward"):
        hp.list_ops(model, lambda: model(ids).sum())
    with pytest.raises(PlanError, match=r"ran none of the model's blocks"):
        hp.list_ops(model, lambda: None)
    with pytest.raises(TypeError, match=r"step must be a callable"):
        hp.list_ops(model, 3)


def test_a_block_that_somebody_replaced_since_is_named() -> None:
    model, _ = transformer()
    applied = hp.apply_rules(model, "boundary")
    original = model.layers[1]
    model.layers[1] = nn.Identity()
    with pytest.raises(PlanError, match=r"cannot put layers\.1 back"):
        applied.remove()
    assert type(model.layers[0]) is type(model.layers[2])
    model.layers[1] = original.wrapped_module
