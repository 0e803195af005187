"""Tiny models of five families, with random weights, made from ``transformers`` configurations.

Activations outweigh weights on purpose, so that a peak says something about activations. Dropout is on wherever the
family has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 67
BATCH, LENGTH, WIDTH = 4, 32, 32

Batch = dict[str, Any]


def _token_ids(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def text_batch(seed: int = 0) -> Batch:
    """Token ids, their labels, and a mask with padding on the right; no key-value cache in training."""
    ids = _token_ids(seed)
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 5 :] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask, "use_cache": False}


def image_batch(seed: int = 0) -> Batch:
    """Pixels and classes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 5, (BATCH,), generator=generator),
    }


def llama(**changes: Any) -> LlamaForCausalLM:
    """Decoder, rope tables shared by all layers, grouped keys and values; no dropout, so the fused attention runs."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
        )
    )


def _t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def _mixtral() -> MixtralForCausalLM:
    # Eight experts and a hundred tokens: some experts get few tokens or none, and which ones depends on the data.
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=8,
            num_experts_per_tok=2,
            attention_dropout=0.1,
            output_router_logits=True,
            max_position_embeddings=64,
        )
    )


def _vit() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.1,
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how to build it, feed it, and where its layers are."""

    build: Callable[[], PreTrainedModel]
    batch: Callable[[int], Batch]
    layer_lists: Callable[[Any], Iterator[nn.ModuleList]]


FAMILIES: dict[str, Family] = {
    "llama": Family(build=llama, batch=text_batch, layer_lists=lambda m: iter([m.model.layers])),
    "gpt2": Family(build=_gpt2, batch=text_batch, layer_lists=lambda m: iter([m.transformer.h])),
    "t5": Family(build=_t5, batch=text_batch, layer_lists=lambda m: iter([m.encoder.block, m.decoder.block])),
    "mixtral": Family(build=_mixtral, batch=text_batch, layer_lists=lambda m: iter([m.model.layers])),
    "vit": Family(build=_vit, batch=image_batch, layer_lists=lambda m: iter([m.vit.layers])),
}


def build(name: str, seed: int = 0) -> Any:  # transformers' own model class
    """A model of this family, always with the same weights for the same seed, in training mode."""
    torch.manual_seed(seed)
    model = FAMILIES[name].build()
    return model.train()


def wrap_layers(name: str, model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Put ``wrap(layer)`` in the place of every layer, as a user does."""
    for layers in FAMILIES[name].layer_lists(model):
        for index in range(len(layers)):
            layers[index] = wrap(layers[index])
