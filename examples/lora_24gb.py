"""LoRA of a Llama-3-8B on a card of 24 GB: say what the card has, and leave the choice to the planner.

python -m examples.lora_24gb                                     # a tiny model on the simulated accelerator
python -m examples.lora_24gb --gpu --tokens 4096 --budget 22GiB  # 8B, with random weights
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 128}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def train(shape: dict[str, int], device: str, num_tokens: int, budget: str | None, begin=lambda: None) -> list[float]:
    torch.manual_seed(0)
    with torch.device(device):
        base = LlamaForCausalLM(LlamaConfig(**shape, **HEADS, max_position_embeddings=num_tokens))
        base = base.to(torch.bfloat16 if device == "cuda" else torch.float32)
        model = get_peft_model(base, LoraConfig(r=16, target_modules=LINEARS)).train()
        tokens = torch.randint(0, shape["vocab_size"], (1, num_tokens))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW's states come on top of the budget

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    if budget is not None:
        print(hp.fit_memory(model, step, budget, steps=3).summary())  # this is the line
    begin()
    losses = []
    while len(losses) < 3:
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--budget", default="2200KiB")
    options = parser.parse_args()
    if options.gpu:
        print(train(LLAMA_8B, "cuda", options.tokens, options.budget), torch.cuda.max_memory_allocated())
    for budget in () if options.gpu else (None, options.budget):
        with simulated_accelerator() as accelerator:
            losses = train(TINY, "cpu", options.tokens, budget, accelerator.reset_peak)
        print(f"{budget or 'plain':10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")
