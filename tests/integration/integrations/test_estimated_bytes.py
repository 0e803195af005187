"""What the estimate says that a layer saves, against what autograd saves of models of transformers, counted on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import peft
import pytest
import torch
import transformers

from hyper_parallel.backends.torch.planner.saved_values import list_saved
from hyper_parallel.estimation.cards import CARDS
from hyper_parallel.estimation.config_file import shape_from_config
from hyper_parallel.estimation.step_model import StepModel

TOKENS, BATCH, RANK = 64, 2, 4
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "use_cache": False,
    "attn_implementation": "sdpa",
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
}


def saved_of_one_layer(model: torch.nn.Module) -> int:
    ids = torch.randint(0, COMMON["vocab_size"], (BATCH, TOKENS))
    table = list_saved(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    return sum(row.nbytes for row in table if ".layers.1." in f"{row.module}.")


def estimated_of_one_layer(config: Any, **changes: Any) -> float:
    shape = dataclasses.replace(shape_from_config(config.to_dict()), **changes)
    return StepModel(shape=shape, tokens=TOKENS, batch=BATCH, card=CARDS["h200"]).layer_bytes


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_trained(name: str) -> None:
    kind, config_kind, more = MODELS[name]
    config = config_kind(**COMMON, **more)
    model = kind(config).to(torch.bfloat16).train()
    assert estimated_of_one_layer(config) == pytest.approx(saved_of_one_layer(model), rel=0.04)


@pytest.mark.parametrize("is_float32", [False, True])
def test_adapters(is_float32: bool) -> None:
    config = transformers.LlamaConfig(**COMMON)
    adapters = peft.LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.0)
    base = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    model = peft.get_peft_model(base, adapters, autocast_adapter_dtype=is_float32)
    model.enable_input_require_grads()
    estimated = estimated_of_one_layer(config, lora_rank=RANK, has_float32_adapters=is_float32)
    assert estimated == pytest.approx(saved_of_one_layer(model), rel=0.01)
    assert model.get_nb_trainable_parameters()[0] == 3 * RANK * (6 * 64 + 160 + 64 + 16 + 16 + 64 + 160 + 160 + 64)
