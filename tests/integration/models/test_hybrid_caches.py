"""Decoders whose cache holds more than keys and values: states of convolutions and recurrences, beside or between attention.

Transformers leaves ``use_cache`` on in training, so every block of these models gets a cache that it changes. A recomputed
block must find what its forward found. One step of each family with its default, tiny and random, with and without us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

from .steps import Result, seeded_step

transformers = pytest.importorskip("transformers")

_VOCABULARY = 61
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        **_EXPERTS,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "Lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "Jamba": {
        **_EXPERTS,
        **_MAMBA,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "Zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 8,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
    "Bamba": {**_MAMBA, **_HEADS, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "RecurrentGemma": {
        "num_hidden_layers": 4,
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
        "head_dim": 8,
    },
}


def decoder(family: str) -> Any:
    """A tiny random model of the family, in training, with its own default for the cache."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **FAMILIES[family]})
    assert config.use_cache
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, _VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "labels": ids.clone()}


def with_rules(model: Any) -> Any:
    return hp.apply_rules(model, "boundary")


def with_wrappers(model: Any) -> Any:
    layers = model.model.layers
    assert isinstance(layers, nn.ModuleList)
    for index, layer in enumerate(layers):
        layers[index] = hp.checkpoint_wrapper(layer)
    return model


def are_equal(one: Result, other: Result) -> bool:
    """Bitwise, gradient by gradient."""
    return torch.equal(one.loss, other.loss) and all(
        (gradient is None and other.gradients[name] is None) or torch.equal(gradient, other.gradients[name])
        for name, gradient in one.gradients.items()
    )


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])
@pytest.mark.parametrize("treat", [with_rules, with_wrappers])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_cache_in_training_is_exact(
    family: str, treat: Callable[[Any], Any], native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_NATIVE", native)
    wanted = [seeded_step(decoder(family), batch()) for _ in range(2)]
    assert are_equal(*wanted)
    assert all(gradient is None or gradient.isfinite().all() for gradient in wanted[0].gradients.values())
    model = decoder(family)
    with simulated_accelerator():
        treat(model)
        for _ in range(2):
            assert are_equal(seeded_step(model, batch()), wanted[0])
        stats = hp.stats()
    regions = stats.regions_from_tape + sum(stats.regions_from_python.values())
    assert regions == 2 * model.config.num_hidden_layers
