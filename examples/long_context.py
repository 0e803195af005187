"""Full fine-tuning of a 1B model at 128k tokens: layers are recomputed, their inputs swapped, and logits are made in pieces.

python -m examples.long_context                        # a tiny model on the simulated accelerator
python -m examples.long_context --gpu --tokens 131072   # Llama-3.2-1B's shape, with random weights
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hyper_parallel as hp
from hyper_parallel.testing import simulated_accelerator

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 128}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}


def chunk_loss(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(head(hidden).float(), labels, reduction="sum")


def train(shape: dict[str, int], device: str, num_tokens: int, *, is_long: bool) -> list[float]:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape, **HEADS, max_position_embeddings=num_tokens, use_cache=False))
        model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).train()
        tokens = torch.randint(0, shape["vocab_size"], (1, num_tokens + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if is_long:
        hp.apply_rules(model.model, "boundary")  # each layer is recomputed, and its input swapped
    compute = hp.checkpoint if is_long else lambda function, *args: function(*args)
    losses = []
    for _ in range(3):
        hidden = model.model(tokens[:, :-1]).last_hidden_state[0]
        pieces = zip(hidden.split(num_tokens // 16), tokens[0, 1:].split(num_tokens // 16), strict=True)
        loss = sum(compute(chunk_loss, model.lm_head, *piece) for piece in pieces) / num_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    if options.gpu:
        losses = train(LLAMA_1B, "cuda", options.tokens, is_long=True)
        print(f"losses {losses}, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    for name in () if options.gpu else ("plain", "long"):
        with simulated_accelerator() as accelerator:
            losses = train(TINY, "cpu", options.tokens, is_long=name == "long")
        print(f"{name:10} peak {accelerator.peak_bytes / 2**20:6.2f} MiB   losses {losses}")
