"""The estimate: bytes and operations as arithmetic, what fits, what is refused and how."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.errors import BudgetTooSmallError
from hyper_parallel.estimation import ways
from hyper_parallel.estimation.cards import CARDS, Card, card_named
from hyper_parallel.estimation.config_file import shape_from_config
from hyper_parallel.estimation.estimate import USABLE_SHARE
from hyper_parallel.estimation.shape import ModelShape
from hyper_parallel.estimation.step_model import StepModel

STACK = ModelShape(width=4096, layers=16, heads=32, hidden=11008, has_rotary=False, kernels="torch")
LLAMA_8B = ModelShape(width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, vocabulary=128256)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def step_of(shape: ModelShape, tokens: int = 8192, batch: int = 2, card: str = "h200") -> StepModel:
    return StepModel(shape=shape, tokens=tokens, batch=batch, card=CARDS[card])


def test_what_a_layer_of_the_stack_saves() -> None:
    tokens, width, hidden = 2 * 8192, 4096, 11008
    values = 2 * (8 * width + 4 * hidden)  # x, norm, qkv, attention, x, norm; gate, up, silu, product
    sums = 4 * 32  # attention's float for each head
    assert step_of(STACK).layer_bytes == tokens * (values + sums)


def test_what_a_layer_of_transformers_saves() -> None:
    tokens, width, hidden = 2 * 8192, 4096, 14336
    norms = 2 * (4 + 2 + 2) * width  # float32 copy, normalized, weighted
    values = 2 * (width + 2 * width // 4 + width) + 4 * 32  # q, k, v, attention and its sums
    assert step_of(LLAMA_8B).layer_bytes == tokens * (norms + values + 2 * 4 * hidden)


def test_frozen_weights_save_less_and_float32_adapters_more() -> None:
    tokens, width, hidden, rank = 2 * 8192, 4096, 14336, 16
    plain = step_of(LLAMA_8B).layer_bytes
    lora = step_of(dataclasses.replace(LLAMA_8B, lora_rank=rank)).layer_bytes
    assert lora == plain - tokens * 2 * 2 * width + tokens * 7 * rank * 2  # norms' factors; LoRA's inner values
    wide = step_of(dataclasses.replace(LLAMA_8B, lora_rank=rank, has_float32_adapters=True)).layer_bytes
    copies = 4 * (6 * width + hidden) - 2 * (2 * width + hidden)  # of seven inputs, in place of three values in bf16
    assert wide == lora + tokens * (copies + 7 * rank * 2)


def test_the_operations_of_the_stack() -> None:
    step = step_of(STACK)
    weights = STACK.layer_parameters - 2 * STACK.width
    assert sum(op.flops for op in step.ops) == 2 * weights
    assert sum(op.backward_flops for op in step.ops) == 4 * weights
    assert sum(op.flops_per_length for op in step.ops) == 2 * STACK.width  # two matmuls over half of the sequence


def test_frozen_weights_need_one_matmul_less_in_backward() -> None:
    step = step_of(dataclasses.replace(LLAMA_8B, lora_rank=16))
    forward, backward = sum(op.flops for op in step.ops), sum(op.backward_flops for op in step.ops)
    assert 1.0 < backward / forward < 1.02
    plain, lora = step_of(LLAMA_8B), step
    assert (
        ways.recomputed(lora).seconds / ways.kept(lora).seconds
        > ways.recomputed(plain).seconds / ways.kept(plain).seconds + 0.05
    )


def test_parameters_are_those_of_known_models() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert dataclasses.replace(LLAMA_8B, lora_rank=16).adapter_parameters == 41_943_040
    found = hp.estimate(LLAMA_8B, tokens=1024, lora_rank=16)
    assert (found.weight_bytes, found.gradient_bytes) == (2 * (8_030_261_248 + 41_943_040), 2 * 41_943_040)
    assert found.optimizer_bytes == 2 * found.gradient_bytes
    states = {name: hp.estimate(LLAMA_8B, tokens=64, optimizer=name).optimizer_bytes for name in ("adamw-fp32", "sgd")}
    assert states == {"adamw-fp32": 12 * 8_030_261_248, "sgd": 0}


def test_experts_are_counted_by_what_a_token_uses() -> None:
    shape = ModelShape(width=64, layers=2, heads=4, hidden=32, experts=8, experts_per_token=2)
    more = dataclasses.replace(shape, experts=16)
    assert more.parameters > shape.parameters
    assert step_of(more).layer_bytes == step_of(shape).layer_bytes
    flops = {one.experts: {op.name: op.flops for op in step_of(one).ops} for one in (shape, more)}
    assert flops[8]["expert in"] == flops[16]["expert in"] == 2 * 2 * 64 * 64


@pytest.mark.parametrize("name", ["plain", "recompute", "inputs", "swap", "plan"])
@pytest.mark.parametrize("card", ["h200", "a100-80gb", "rtx-4090"])
def test_the_longest_sequence_fits_and_the_next_does_not(name: str, card: str) -> None:
    shape = dataclasses.replace(LLAMA_8B, layers=4, vocabulary=32000)
    way = hp.estimate(shape, tokens=2048, card=card, optimizer="sgd").way(name)
    usable = USABLE_SHARE * CARDS[card].memory_bytes
    assert way.longest_sequence >= 128
    assert way.largest_batch >= 1

    def peak(**changes: int) -> int:
        found = hp.estimate(shape, card=card, optimizer="sgd", **{"tokens": 2048, **changes})
        one = found.way(name)
        if name != "plan":
            return one.peak_bytes
        step = StepModel(shape=shape, tokens=found.tokens, batch=found.batch, card=CARDS[card])
        return int(found.fixed_bytes + ways.smallest_plan(step))

    assert peak(tokens=way.longest_sequence) <= usable < peak(tokens=way.longest_sequence + 128)
    assert peak(batch=way.largest_batch) <= usable < peak(batch=way.largest_batch + 1)


def test_less_memory_never_makes_a_plan_faster() -> None:
    step = step_of(LLAMA_8B, batch=1)
    top, floor = ways.kept(step).activation_bytes, ways.smallest_plan(step)
    seconds = []
    for share in range(21):
        outcome = ways.planned(step, top + (floor - top) * share / 20)
        assert outcome is not None
        seconds.append(outcome.seconds)
    assert seconds == sorted(seconds)
    assert seconds[0] == ways.kept(step).seconds
    assert ways.planned(step, floor - 1) is None


def test_a_plan_is_no_slower_than_recompute_at_its_memory() -> None:
    for shape in (STACK, LLAMA_8B, dataclasses.replace(LLAMA_8B, lora_rank=16)):
        found = hp.estimate(shape, tokens=8192, card="a100-80gb")
        assert found.way("plan").ratio <= found.way("recompute").ratio
        assert found.way("plan").peak_bytes <= found.way("recompute").peak_bytes


def test_a_faster_link_hides_more() -> None:
    slow = hp.estimate(LLAMA_8B, tokens=8192, card="h200")
    fast = hp.estimate(LLAMA_8B, tokens=8192, card=dataclasses.replace(CARDS["h200"], link_bytes_per_second=350e9))
    assert fast.way("swap").host_bytes > slow.way("swap").host_bytes
    assert fast.way("plan").ratio < slow.way("plan").ratio


def test_copies_that_the_link_does_not_hide_cost_time() -> None:
    crawling = dataclasses.replace(CARDS["h200"], link_bytes_per_second=1e9)
    step = dataclasses.replace(step_of(STACK), card=crawling)
    inputs, recomputed = ways.inputs_swapped(step), ways.recomputed(step)
    exposed = inputs.host_bytes / 1e9 - step.layers_forward_seconds
    bandwidth = 2 * inputs.host_bytes / (step.shares.bandwidth * crawling.memory_bytes_per_second)
    assert inputs.seconds - recomputed.seconds == pytest.approx(exposed + bandwidth)


def test_a_budget_is_kept_or_refused_with_the_smallest_peak() -> None:
    found = hp.estimate(LLAMA_8B, tokens=8192, budget="90GiB")
    assert found.way("plan").peak_bytes <= 90 * 2**30
    with pytest.raises(
        BudgetTooSmallError, match=r"estimate: 10\.00 GiB cannot hold .* smallest peak .* GiB"
    ) as caught:
        hp.estimate(LLAMA_8B, tokens=8192, budget="10GiB")
    least = caught.value.smallest_peak_bytes
    assert least is not None
    assert hp.estimate(LLAMA_8B, tokens=8192, budget=least + 1).way("plan").peak_bytes <= least + 1


def test_a_config_file_its_folder_and_its_content_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = [hp.estimate(given, tokens=64).shape for given in (tmp_path, tmp_path / "config.json", CONFIG)]
    assert shapes == [LLAMA_8B] * 3
    assert shape_from_config({"text_config": CONFIG, "hidden_size": 1}) == LLAMA_8B


def test_configs_of_other_families() -> None:
    gpt2 = shape_from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257}
    )
    assert (gpt2.hidden, gpt2.is_gated, gpt2.has_rotary) == (3072, False, False)
    moe = shape_from_config(
        CONFIG
        | {
            "model_type": "qwen3_moe",
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "head_dim": 128,
        }
    )
    assert (moe.experts, moe.experts_per_token, moe.hidden, moe.has_qk_norm) == (32, 8, 768, True)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {**CONFIG, "hidden_size": None, "hidden_sizes": 4096},
            r"no 'hidden_size' \(or n_embd, d_model\).*mean hidden_sizes",
        ),
        ({}, r"no 'hidden_size'.*whole numbers are: none"),
        ({**CONFIG, "vocab_size": "many"}, r"'vocab_size' in the config must be a whole number, got 'many'"),
        ({**CONFIG, "kv_lora_rank": 512}, r"multi-head latent attention is not estimated"),
        ({**CONFIG, "num_key_value_heads": 7}, r"32 heads cannot share 7 key-value heads evenly"),
        ({**CONFIG, "num_local_experts": 8}, r"no 'num_experts_per_tok'"),
        ([1], r"must hold a JSON object, got list"),
    ],
)
def test_a_config_that_cannot_be_estimated_says_why(config: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        shape_from_config(config)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json as JSON"):
        hp.estimate(tmp_path, tokens=64)
    with pytest.raises(FileNotFoundError):
        hp.estimate(tmp_path / "absent.json", tokens=64)


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"tokens": 0}, ValueError, r"tokens is 0; it must be 1 or more"),
        ({"tokens": 8192.0}, TypeError, r"tokens must be a whole number, got 8192\.0"),
        ({"batch": -1}, ValueError, r"batch is -1"),
        ({"card": "h20"}, ValueError, r"unknown card 'h20'; did you mean h200"),
        ({"card": "abacus"}, ValueError, r"unknown card 'abacus'\. Known are h200, "),
        ({"dtype": "fp32"}, ValueError, r"unknown dtype 'fp32'.*float32 steps were not measured"),
        ({"optimizer": "adam"}, ValueError, r"unknown optimizer 'adam'.*did you mean adamw"),
        ({"kernels": "ligre"}, ValueError, r"unknown kernels 'ligre'.*did you mean liger"),
        ({"lora_rank": -4}, ValueError, r"lora_rank is -4"),
        ({"has_float32_adapters": True}, ValueError, r"there are no adapters; give a lora_rank"),
        ({"budget": "lots"}, ValueError, r"estimate: budget: cannot read 'lots' as bytes"),
    ],
)
def test_a_mistake_is_answered(settings: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        hp.estimate(LLAMA_8B, **{"tokens": 8192, **settings})


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers is 0; it must be 1 or more"):
        dataclasses.replace(STACK, layers=0)
    with pytest.raises(ValueError, match=r"8 experts cannot send each token to 9"):
        dataclasses.replace(STACK, experts=8, experts_per_token=9)
    with pytest.raises(TypeError, match=r"model must be a ModelShape or a Hugging Face config, got int"):
        hp.estimate(7, tokens=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a card's flops must be more than 0"):
        Card(name="none", memory_bytes=1, link_bytes_per_second=1.0, flops=0.0, memory_bytes_per_second=1.0)
    with pytest.raises(KeyError, match=r"there is no way 'plane'.*did you mean plan"):
        hp.estimate(STACK, tokens=64).way("plane")


@pytest.mark.parametrize(
    ("driver", "card"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
    ],
)
def test_cards_are_known_by_what_drivers_call_them(driver: str, card: str) -> None:
    assert card_named(driver).name == card


@pytest.mark.parametrize("driver", ["NVIDIA H20", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40"])
def test_a_card_of_a_similar_name_is_not_taken_for_another(driver: str) -> None:
    with pytest.raises(ValueError, match="unknown card"):
        card_named(driver)


def test_what_makes_the_error_larger_is_said() -> None:
    assert hp.estimate(LLAMA_8B, tokens=8192).way("recompute").errors.ratio == 0.10
    elsewhere = hp.estimate(LLAMA_8B, tokens=8192, card="h100")
    assert elsewhere.way("recompute").errors.ratio == 0.20
    assert any("only steps on an H200 were compared" in note for note in elsewhere.notes)
    tiny = hp.estimate(ModelShape(width=64, layers=2, heads=4, hidden=128), tokens=64)
    assert any("measure this one" in note for note in tiny.notes)
    huge = hp.estimate(LLAMA_8B, tokens=8192, card="rtx-4090")
    assert any("Nothing fits rtx-4090" in note for note in huge.notes)
    assert huge.way("plan").longest_sequence == huge.way("plan").largest_batch == 0


def test_it_is_json_and_a_table() -> None:
    found = hp.estimate(LLAMA_8B, tokens=8192)
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["schema"] == 1
    assert [way["name"] for way in data["ways"]] == ["plain", "recompute", "inputs", "swap", "plan"]
    lines = str(found).splitlines()
    assert lines[0].split() == ["way", "peak", "activations", "step", "longest", "batch"]
    assert [line.split()[0] for line in lines[1:6]] == ["plain", "recompute", "inputs", "swap", "plan"]


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, hyper_parallel as hp;"
        "hp.estimate(hp.ModelShape(width=64, layers=2, heads=4, hidden=128), tokens=64);"
        "from hyper_parallel.cli.command_line import main;"
        "main('estimate --width 64 --layers 2 --heads 4 --hidden 128 --tokens 64 --json'.split());"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'mindspore', 'numpy'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["tokens"] == 64
