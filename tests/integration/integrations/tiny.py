"""A tiny random language model, its data, and the comparison that every integration passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hyper_parallel.testing import simulated_accelerator

VOCABULARY, LENGTH, STEPS, BATCH = 67, 32, 3, 4


def model() -> LlamaForCausalLM:
    """Activations outweigh weights, so that the peak says something about activations."""
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token; nothing is fetched."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>"
    )


def rows(count: int = STEPS * BATCH) -> list[dict[str, Any]]:
    """Token ids and their labels, as a dataset of dictionaries."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids]


def batches() -> list[dict[str, torch.Tensor]]:
    """The same, in batches."""
    ids = torch.tensor([row["input_ids"] for row in rows()]).split(BATCH)
    return [{"input_ids": part, "labels": part.clone()} for part in ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one training left behind."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    peak_bytes: int
    swapped_bytes: int


def run(train: Callable[[], tuple[list[float], torch.nn.Module]]) -> Run:
    """Train on the simulated accelerator: the losses of the steps, the weights after them, and the peak."""
    with simulated_accelerator() as simulation:
        losses, trained = train()
        weights = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
        return Run(
            losses=losses, weights=weights, peak_bytes=simulation.peak_bytes, swapped_bytes=simulation.swapped_bytes
        )


def assert_same_but_smaller(ours: Run, plain: Run) -> None:
    """The same losses and weights, bit for bit and name for name, at a lower peak."""
    assert len(plain.losses) == STEPS
    assert ours.losses == plain.losses
    assert ours.weights.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        assert torch.equal(ours.weights[name], weight), name
    assert ours.peak_bytes < plain.peak_bytes


def names_of_wrapped(trained: torch.nn.Module) -> list[str]:
    """Which modules are still ours."""
    from hyper_parallel.backends.torch.wrappers import ActivationWrapper

    return [name for name, module in trained.named_modules() if isinstance(module, ActivationWrapper)]
