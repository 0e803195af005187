"""Small models whose activations outweigh their weights, each with a step that accumulates gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 4, 32, 32, 4, 61

Step = Callable[[], torch.Tensor]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attn(x))


class Transformer(nn.Module):
    """An embedding, layers with dropout, a buffer that every forward changes, a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def token_ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def transformer(layers: int = 4) -> tuple[nn.Module, Step]:
    torch.manual_seed(1)
    model = Transformer(layers)
    ids = token_ids()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        return loss.detach()

    return model, step


def _hugging_face(name: str, **changes: Any) -> tuple[nn.Module, Step]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(2)
    config: Any
    model: Any
    if name == "llama":
        config = transformers.LlamaConfig(**common, **sizes, **changes)
        model = transformers.LlamaForCausalLM(config)
    elif name == "moe":
        config = transformers.MixtralConfig(**common, **sizes, num_local_experts=4, num_experts_per_tok=2, **changes)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.GPT2Config(**common, n_positions=64, n_embd=WIDTH, n_layer=4, n_head=HEADS, **changes)
        model = transformers.GPT2LMHeadModel(config)
    model.train()
    ids = token_ids()

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss  # the key-value cache is left on, as most people leave it
        loss.backward()
        return loss.detach()

    return model, step


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "transformer": transformer,
    "llama": lambda: _hugging_face("llama"),
    "gpt2": lambda: _hugging_face("gpt2"),
    "moe": lambda: _hugging_face("moe"),
}


def gradients(model: nn.Module, step: Step, seed: int = 7) -> dict[str, torch.Tensor]:
    """The gradients of one step from nothing, with the random state set."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    step()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names, the same bits, and something to compare."""
    assert got.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not different, f"{len(different)} of {len(wanted)} differ, first {different[:3]}"
    assert any(bool(gradient.any()) for gradient in wanted.values())


def tree_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that applying and removing must leave as it was."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        path: (id(module), type(module), module.training, [len(getattr(module, name)) for name in hooks])
        for path, module in model.named_modules()
    }
