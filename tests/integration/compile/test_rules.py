"""Rules, presets and treatments of compiled blocks: their fates are in the graph, and hooks around it swap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy, SwapConfig
from hyper_parallel.core.activation_checkpoint.policy import ByOpName
from hyper_parallel.errors import PlanError
from hyper_parallel.integrations.treatment import apply

from .parts import BLOCKS, GraphsBackend, assert_same, graph_breaks, graphs_traced, stack, step

INPUT_BYTES = 24 * 16 * 4
SAVE_UP = {"blocks.*.up::addmm": "save", "*::*": "recompute"}


def _disk(path: Path) -> SwapConfig:
    return SwapConfig(
        min_bytes=0, tail_bytes=0, window_bytes=4096, prefetch_bytes=4096, tiers=("disk",), disk_path=str(path)
    )


def _plain() -> list[torch.Tensor]:
    model = stack()
    return step(model, model.parameters())


def as_modules(model: nn.Module, backend: Any) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


@pytest.mark.parametrize("compile_blocks", [as_modules, in_place])
def test_rules_by_module_on_compiled_blocks(compile_blocks: Any) -> None:
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack()
    compile_blocks(model, graphs)
    with hp.apply_rules(model, SAVE_UP) as handle:
        for _ in range(2):
            assert_same(step(model, model.parameters()), wanted)
        assert handle.decided() == {"blocks.*.up::addmm": 1, "*::*": 5}  # blocks treated alike share one graph
    assert graphs_traced() == 1
    assert not graph_breaks()
    assert graphs.recomputed() == {"addmm": 0, "native_layer_norm": 1}


def test_a_rule_for_one_block_gives_it_a_graph_of_its_own(tmp_path: Path) -> None:
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack()
    in_place(model, graphs)
    rules = {"blocks.1.up::addmm": "swap", "blocks.2::input": "swap", "*::*": "recompute"}
    with hp.configure(_disk(tmp_path)), hp.apply_rules(model, rules):
        assert_same(step(model, model.parameters()), wanted)
    assert sorted(graphs.count([graph], "addmm") for graph in graphs.backward) == [0, 1, 1]
    assert hp.stats().swapped_out_bytes == 4 * INPUT_BYTES + INPUT_BYTES


def test_rules_before_the_whole_model_is_compiled() -> None:
    wanted = _plain()
    graphs = GraphsBackend()
    model = stack()
    with hp.apply_rules(model, SAVE_UP) as handle:
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        assert_same(step(compiled, model.parameters()), wanted)
        assert handle.decided() == {"blocks.*.up::addmm": BLOCKS, "*::*": 5 * BLOCKS}
    assert graphs.recomputed() == {
        "addmm": 1,
        "native_layer_norm": BLOCKS,
    }  # the last block's output, for what follows it
    assert_same(step(compiled, model.parameters()), wanted)  # and without the rules, traced anew
    assert graphs_traced() == 2


def test_a_rule_that_matches_nothing_is_named() -> None:
    model = stack()
    in_place(model, "aot_eager")
    hp.apply_rules(model, {"blocks.*.up::mm": "save", "*::*": "recompute"})
    with pytest.raises(PlanError, match=r"'blocks\.\*\.up::mm' matched nothing .* near misses: addmm"):
        model(torch.ones(24, 16))


@pytest.mark.parametrize("preset", ["boundary", "attention", "elementwise", "auto"])
def test_presets_on_compiled_blocks(preset: str, tmp_path: Path) -> None:
    wanted = _plain()
    model = stack()
    in_place(model, "aot_eager")
    with hp.configure(_disk(tmp_path)), hp.apply_rules(model, preset):
        assert_same(step(model, model.parameters()), wanted)
    assert not graph_breaks()
    assert (hp.stats().swapped_out_bytes > 0) == (preset != "elementwise")


@pytest.mark.parametrize("what", ["swap", "recompute", ByOpName({"addmm": CheckpointPolicy.MUST_SWAP})], ids=str)
def test_treatments_of_compiled_blocks(what: Any, tmp_path: Path) -> None:
    wanted = _plain()
    model = stack()
    as_modules(model, "aot_eager")
    with hp.configure(_disk(tmp_path)), apply(model, what):
        assert_same(step(model, model.parameters()), wanted)
    assert not graph_breaks()
    assert (hp.stats().swapped_out_bytes > 0) == (what != "recompute")


@pytest.mark.parametrize("order", ["compiled first", "compiled last"])
def test_transformers_llama_by_blocks(order: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=64,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(32).reshape(2, 16) % 64

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    wanted = gradients()
    graphs = GraphsBackend()
    layers = model.model.layers
    for number, layer in enumerate(layers):
        if order == "compiled first":
            layer.compile(backend=graphs, fullgraph=True)
        layers[number] = hp.checkpoint_wrapper(layer, policy_fn=ByOpName({"mm": CheckpointPolicy.MUST_SWAP}))
        if order == "compiled last":
            layers[number].compile(backend=graphs, fullgraph=True)
    with hp.configure(_disk(tmp_path)):
        assert_same(gradients(), wanted)
    assert not graph_breaks()
    assert len(graphs.forward) == 1
    plain_mm = 2 * graphs.count(graphs.forward, "mm")  # backward of each: the gradients of its input and of its weight
    assert graphs.count(graphs.backward, "mm") == plain_mm
    assert hp.stats().swapped_out_bytes > 0
