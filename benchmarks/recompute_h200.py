"""Everything recomputed, nothing swapped: the tape against torch's checkpoint on models of several kinds.

    python -m benchmarks.recompute_h200 [--cases launch lora moe llama3] [--pairs 10] [-o FILE]

Each case is a process of its own. The ways are interleaved: every round runs one step of each, beginning with another one. A
time is the median over rounds; a ratio is the median of the rounds' ratios, with the smallest and the largest. Activations are
the peak of active bytes minus weights and gradients. Before that, gradients are compared bitwise with the plain step's, with
deterministic kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
_GIB = 2**30
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

Case = tuple[nn.Module, Callable[[], torch.Tensor], nn.ModuleList]


class Block(nn.Module):
    """Grouped attention with rotary positions and norms of queries and keys; gate and up in one matrix."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.norm_q, self.norm_k = nn.RMSNorm(self.size), nn.RMSNorm(self.size)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.size, bias=False)
        self.v = nn.Linear(width, groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions."""
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One block."""
        batch, length, width = x.shape
        y = self.norm1(x)
        q = self.norm_q(self.q(y).view(batch, length, self.heads, self.size)).transpose(1, 2)
        k = self.norm_k(self.k(y).view(batch, length, self.groups, self.size)).transpose(1, 2)
        v = self.v(y).view(batch, length, self.groups, self.size).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            self.rotate(q, cos, sin), self.rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Stack(nn.Module):
    """Blocks without an embedding."""

    def __init__(self, layers: int, width: int, heads: int, groups: int, hidden: int, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(layers))
        size = width // heads
        angles = torch.outer(torch.arange(length).float(), 1 / 10000 ** (torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def _stack(layers: int, width: int, heads: int, groups: int, hidden: int, length: int, batch: int) -> Case:
    with torch.device("cuda"):
        model = Stack(layers, width, heads, groups, hidden, length).to(torch.bfloat16)
    x = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn_like(x) / x.numel() ** 0.5
    return model, lambda: (model(x) * weight).sum(), model.layers


def _transformer(kind: str, config: str, batch: int, length: int, **shape: Any) -> Case:
    import transformers

    settings = getattr(transformers, config)(
        max_position_embeddings=length, attn_implementation="sdpa", use_cache=False, **shape
    )
    with torch.device("cuda"):
        model = getattr(transformers, kind)(settings).to(torch.bfloat16).train()
    tokens = torch.randint(0, shape["vocab_size"], (batch, length), device="cuda")
    return model, lambda: model(input_ids=tokens, labels=tokens).loss, model.model.layers


def _launch() -> Case:
    return _stack(24, 1024, 16, 8, 2816, 2048, 1)


def _gqa() -> Case:
    return _stack(10, 5120, 40, 8, 13824, 16384, 1)


def _llama3() -> Case:
    return _transformer("LlamaForCausalLM", "LlamaConfig", 1, 8192, num_hidden_layers=16, **_LLAMA)


def _lora() -> Case:
    from peft import LoraConfig, get_peft_model

    model, _, layers = _transformer("LlamaForCausalLM", "LlamaConfig", 1, 4096, num_hidden_layers=32, **_LLAMA)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linears, lora_dropout=0.0))
    tuned = tuned.to(torch.bfloat16)
    tuned.enable_input_require_grads()
    tokens = torch.randint(0, 128256, (1, 4096), device="cuda")
    return tuned, lambda: tuned(input_ids=tokens, labels=tokens).loss, layers


def _moe() -> Case:
    return _transformer(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        2,
        4096,
        vocab_size=32000,
        num_hidden_layers=8,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=8,
    )


def _liger() -> Case:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return _transformer("LlamaForCausalLM", "LlamaConfig", 2, 8192, num_hidden_layers=12, **_LLAMA)


CASES: dict[str, Callable[[], Case]] = {
    "launch": _launch,
    "lora": _lora,
    "moe": _moe,
    "llama3": _llama3,
    "gqa": _gqa,
    "liger": _liger,
}


class TorchCheckpoint(nn.Module):
    """Torch's own non-reentrant checkpoint around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer, recomputed in backward."""
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def _wrap(way: str, layer: nn.Module) -> nn.Module:
    if way == "none":
        return layer
    return TorchCheckpoint(layer) if way == "torch checkpoint" else hp.checkpoint_wrapper(layer)


@contextlib.contextmanager
def _wrapped(way: str, layers: nn.ModuleList) -> Iterator[None]:
    originals = list(layers)
    os.environ["HYPER_PARALLEL_NATIVE"] = "1" if way == "tape" else "0"
    for at, layer in enumerate(originals):
        layers[at] = _wrap(way, layer)
    try:
        yield
    finally:
        for at, layer in enumerate(originals):
            layers[at] = layer


def _differences(
    model: nn.Module, forward: Callable[[], torch.Tensor], layers: nn.ModuleList, ways: tuple[str, ...]
) -> dict[str, bool]:
    """By way: whether its gradients differ from the plain step's, with deterministic kernels."""
    wanted: list[torch.Tensor] = []
    differs = {}
    torch.use_deterministic_algorithms(True, warn_only=True)
    for way in ways:
        for _ in range(2):  # the second step runs from tapes that were proven
            with _wrapped(way, layers):
                model.zero_grad(set_to_none=False)
                forward().backward()
        found = [p.grad.to("cpu", copy=True) for p in model.parameters() if p.grad is not None]
        wanted = wanted or found
        differs[way] = not all(map(torch.equal, wanted, found))
    torch.use_deterministic_algorithms(False)
    return differs


def _measure(case: str, pairs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, forward, layers = CASES[case]()
    forward().backward()
    torch.cuda.synchronize()
    trained = [p for p in model.parameters() if p.grad is not None]
    fixed = sum(p.nbytes for p in model.parameters()) + sum(p.grad.nbytes for p in trained if p.grad is not None)
    ways = ("none", "torch checkpoint", "python", "tape")
    times: dict[str, list[float]] = {way: [] for way in ways}
    hosts: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)
    differs = _differences(model, forward, layers, ways)
    for step in range(pairs + 3):
        for way in (ways[(at + step) % len(ways)] for at in range(len(ways))):
            with _wrapped(way, layers):
                model.zero_grad(set_to_none=False)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                forward().backward()
                host = time.perf_counter() - start
                torch.cuda.synchronize()
                took = time.perf_counter() - start
            if step >= 3:
                times[way].append(1e3 * took)
                hosts[way].append(1e3 * host)
                peaks[way] = max(peaks[way], torch.cuda.memory_stats()["active_bytes.all.peak"])
        gc.collect()
    found: dict[str, Any] = {"case": case, "torch": torch.__version__, "pairs": pairs}
    for way in ways:
        ratios = [mine / base for mine, base in zip(times[way], times["none"], strict=True)]
        over = [mine / base for mine, base in zip(times[way], times["torch checkpoint"], strict=True)]
        found[way] = {
            "ms": round(statistics.median(times[way]), 2),
            "host_ms": round(statistics.median(hosts[way]), 2),
            "x_plain": round(statistics.median(ratios), 4),
            "x_torch_checkpoint": round(statistics.median(over), 4),
            "x_torch_checkpoint_range": [round(min(over), 4), round(max(over), 4)],
            "act_gib": round((peaks[way] - fixed) / _GIB, 3),
            "differs_from_plain": differs[way],
        }
    stats = hp.stats()
    found["regions_from_tape"] = stats.regions_from_tape
    found["regions_from_python"] = {
        why: count for why, count in stats.regions_from_python.items() if "switched off" not in why
    }
    return found


def main() -> None:
    """Measure the cases, one process each, and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["launch", "lora", "moe", "llama3"], choices=list(CASES))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    if len(options.cases) == 1:
        line = json.dumps(_measure(options.cases[0], options.pairs))
        print(line, flush=True)
        if options.output:
            with open(options.output, "a") as file:
                file.write(line + "\n")
        return
    for case in options.cases:
        command = [sys.executable, "-m", "benchmarks.recompute_h200", "--cases", case, "--pairs", str(options.pairs)]
        subprocess.run([*command, *(["-o", options.output] if options.output else [])], check=False)


if __name__ == "__main__":
    main()
