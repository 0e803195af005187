"""From a budget to a plan on the device: Hugging Face models, unchanged, under the budget, every gradient bitwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp

pytestmark = pytest.mark.gpu

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 512, 256, 512


def _llama(transformers: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_sizes(), num_key_value_heads=2))


def _moe(transformers: Any) -> torch.nn.Module:
    config = transformers.MixtralConfig(**_sizes(), num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def _gpt2(transformers: Any) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=6, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gradients(model: torch.nn.Module, step: Callable[[], None]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    step()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _peak_of(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["active_bytes.all.peak"]


@pytest.mark.parametrize("build", [_llama, _gpt2, _moe], ids=["llama", "gpt2", "moe"])
def test_the_same_call_on_any_model(build: Callable[[Any], torch.nn.Module]) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.fail("needs the package transformers: pip install transformers", pytrace=False)
    import transformers

    torch.manual_seed(1)
    model = build(transformers).to("cuda").train()
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), device="cuda")

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    wanted = _gradients(model, step)
    fixed = torch.cuda.memory_stats()["active_bytes.all.current"]
    plain = _peak_of(step)
    budget = fixed + int(0.6 * (plain - fixed))
    with hp.configure(hp.SwapConfig()):
        applied = hp.fit_memory(model, step, budget, steps=1)
        assert _peak_of(step) <= budget
        got = _gradients(model, step)
        assert applied.num_regions > 0
        applied.remove()
    assert _peak_of(step) > budget
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name
