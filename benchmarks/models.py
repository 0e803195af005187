"""The models that the benchmarks train: one decoder stack of our own, and Hugging Face ones with random weights."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


class AttentionHalf(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.o(attended.transpose(1, 2).reshape(batch, length, width))


class MlpHalf(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = AttentionHalf(width, heads)
        self.mlp = MlpHalf(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class DecoderStack(nn.Module):
    """Decoder layers only: what activation memory is about, without an embedding or a loss in the way."""

    def __init__(self, layers: int, width: int = 4096, heads: int = 32, hidden: int = 11008) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One size of one model."""

    name: str
    model: str
    tokens: int
    batch: int
    layers: int
    width: int = 4096
    heads: int = 32
    hidden: int = 11008


CASES = {
    case.name: case
    for case in (
        Case(name="stack-8k", model="stack", tokens=8192, batch=2, layers=16),
        Case(name="stack-32k", model="stack", tokens=32768, batch=1, layers=12),
        Case(name="stack-small", model="stack", tokens=2048, batch=1, layers=24, width=1024, heads=16, hidden=2816),
        Case(name="llama-8k", model="llama", tokens=8192, batch=2, layers=16),
        Case(name="llama-32k", model="llama", tokens=32768, batch=1, layers=12),
        Case(name="moe-4k", model="moe", tokens=4096, batch=2, layers=8, width=2048, heads=16, hidden=4096),
        Case(name="stack-tiny", model="stack", tokens=64, batch=2, layers=4, width=64, heads=4, hidden=160),
    )
}


def build(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, nn.ModuleList]:
    """The model, and the list of its layers in which wrappers take place."""
    torch.manual_seed(0)
    if case.model == "stack":
        with torch.device(device):
            stack = DecoderStack(case.layers, case.width, case.heads, case.hidden).to(dtype)
        return stack, stack.layers
    import transformers

    common = {
        "hidden_size": case.width,
        "intermediate_size": case.hidden,
        "num_attention_heads": case.heads,
        "num_key_value_heads": max(1, case.heads // 4),
        "num_hidden_layers": case.layers,
        "vocab_size": 32000,
        "max_position_embeddings": case.tokens,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if case.model == "llama":
        config = transformers.LlamaConfig(**common)
        kind = transformers.LlamaForCausalLM
    else:
        config = transformers.MixtralConfig(**common, num_local_experts=4, num_experts_per_tok=2)
        kind = transformers.MixtralForCausalLM
    with torch.device(device):
        model = kind(config).to(dtype)
    model.train()
    return model, model.model.layers


def make_step(case: Case, model: nn.Module, device: torch.device, dtype: torch.dtype):
    """A function that runs one forward and backward and returns the loss."""
    generator = torch.Generator(device=device).manual_seed(1)
    if case.model == "stack":
        shape = (case.batch, case.tokens, case.width)
        x = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        weight = torch.randn(shape, device=device, dtype=dtype, generator=generator) / x.numel() ** 0.5

        def step() -> torch.Tensor:
            loss = (model(x) * weight).sum()
            loss.backward()
            return loss.detach()
    else:
        ids = torch.randint(0, 32000, (case.batch, case.tokens), device=device, generator=generator)

        def step() -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.detach()

    return step
