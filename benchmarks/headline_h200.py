"""The longest context and the largest batch that one card holds for an 8B model, with what people use and with ours.

    python -m benchmarks.headline_h200 [--tune lora full] [--ways ...] [--limit-seconds 500] [--output FOLDER]
    python -m benchmarks.headline_h200 --simulated      # every code path, on a CPU

Llama-3-8B's shape with random weights in bf16; LoRA (r 16 on all linears) or full fine-tuning, AdamW. In every way the
loss is made in pieces of 4,096 tokens, recomputed one by one: otherwise the logits alone would decide. Contexts grow by
doubling, then the gap is halved down to 8,192 tokens (batches: to 1). A size is held if a whole step, optimizer
included, runs twice; the second one is timed. Each way of each tuning is a process of its own, so that no way inherits
another one's fragments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from benchmarks.offloading import trl_offloading
from hyper_parallel.testing import simulated_accelerator

_PIECE_TOKENS = 4096
_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_TINY_CARD_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Card:
    """Where it runs, and from which size to which step sizes are tried."""

    device: str
    shape: dict[str, int]
    first_tokens: int
    least_tokens: int
    batch_tokens: int


_H200 = Card("cuda", _SHAPE, 32768, 8192, 4096)
_SIMULATED = Card("cpu", _TINY, 64, 32, 32)


def _hugging_face(**kwargs: Any) -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    @contextlib.contextmanager
    def way(model: Any) -> Iterator[None]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kwargs})
        yield

    return way


@contextlib.contextmanager
def _trl(model: Any) -> Iterator[None]:
    offloading = trl_offloading()
    if offloading is None:
        raise SystemExit("headline: TRL cannot be had here; TRL_OFFLOAD_FILE may name its one file")
    with _hugging_face()(model), offloading(use_pin_memory=True, use_streams=True):
        yield


def _blocks(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList))


_WAYS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "plain": lambda model: contextlib.nullcontext(),
    "gradient checkpointing": _hugging_face(),
    "gradient checkpointing, offload": _hugging_face(offload=True),
    "TRL offloading": _trl,
    "ours, boundary": lambda model: hp.apply_rules(_blocks(model), "boundary"),
}


class Headline:
    """One model, tuned in one way."""

    def __init__(self, card: Card, tune: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.card = card
        torch.manual_seed(0)
        with torch.device(card.device):
            config = LlamaConfig(
                **card.shape, **_HEADS, max_position_embeddings=2**21, attn_implementation="sdpa", use_cache=False
            )
            model: Any = LlamaForCausalLM(config).to(torch.bfloat16 if card.device == "cuda" else torch.float32)
        if tune == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=_LINEARS))
            model.enable_input_require_grads()
        self.model = model.train()
        self.decoder, self.head = _blocks(model), model.get_output_embeddings()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=card.device == "cuda")

    def step(self, batch: int, tokens: int) -> float:
        """Seconds of one step."""
        ids = torch.randint(0, self.card.shape["vocab_size"], (batch, tokens + 1), device=self.card.device)
        self._wait()
        start = time.perf_counter()
        hidden = self.decoder(input_ids=ids[:, :-1]).last_hidden_state.flatten(0, 1)
        labels = ids[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for piece, wanted in zip(hidden.split(_PIECE_TOKENS), labels.split(_PIECE_TOKENS), strict=True):
            total = total + checkpoint(self._loss, piece, wanted, use_reentrant=False)
        (total / labels.numel()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._wait()
        return time.perf_counter() - start

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden).float(), labels, reduction="sum")

    def _wait(self) -> None:
        if self.card.device == "cuda":
            torch.cuda.synchronize()

    def held(self, batch: int, tokens: int, peak_of: Callable[[], int] | None) -> float | None:
        """Seconds of the second step; None where the card does not hold it."""
        try:
            self.step(batch, tokens)
            seconds = self.step(batch, tokens)
        except torch.OutOfMemoryError:
            seconds = None
        if seconds is None:
            self.optimizer.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
        elif peak_of is not None and peak_of() > _TINY_CARD_BYTES:
            return None
        return seconds


@dataclasses.dataclass(frozen=True)
class Found:
    """The largest size that is held."""

    size: int
    seconds: float | None
    is_exact: bool  # False: time was up, so that a larger one may be held too


def largest(first: int, least: int, held: Callable[[int], float | None], deadline: float) -> Found:
    """By doubling, then by halving the gap, down to ``least``."""
    low, high, seconds = 0, 0, None  # in steps of the least; high 0: nothing has failed yet
    while not high or high - low > 1:
        if time.monotonic() > deadline:
            return Found(low * least, seconds, is_exact=False)
        steps = (low + high) // 2 if high else max(2 * low, first // least)
        found = held(steps * least)
        if found is None:
            high = steps
        else:
            low, seconds = steps, found
    return Found(low * least, seconds, is_exact=True)


def _measure(
    options: argparse.Namespace, card: Card, peak_of: Callable[[], int] | None, reset: Callable[[], None]
) -> Iterator[str]:
    (tune,), (way,) = options.tune, options.ways
    headline = Headline(card, tune)
    deadline = time.monotonic() + options.limit_seconds

    def held(batch: int, tokens: int) -> float | None:
        reset()
        return headline.held(batch, tokens, peak_of)

    with _WAYS[way](headline.model):
        context = largest(card.first_tokens, card.least_tokens, lambda tokens: held(1, tokens), deadline)
        yield _line(tune, way, "context", context, 1, context.size)
        batch = largest(4, 1, lambda batch: held(batch, card.batch_tokens), deadline)
        yield _line(tune, way, "batch", batch, batch.size, card.batch_tokens)


def _line(tune: str, way: str, what: str, found: Found, batch: int, tokens: int) -> str:
    speed = None if found.seconds is None else round(batch * tokens / found.seconds)
    row = {"tune": tune, "way": way, "largest": what, "batch": batch, "tokens": tokens, "tokens_per_second": speed}
    return json.dumps({**row, "is_exact": found.is_exact, "torch": torch.__version__})


def main() -> None:
    """Measure, one process for each tuning and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=list(_WAYS))
    parser.add_argument("--limit-seconds", type=float, default=500.0, help="for one tuning in one way")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if len(options.tune) * len(options.ways) > 1:
        flags = [
            *(["--simulated"] if options.simulated else []),
            *(["--output", str(options.output)] if options.output else []),
        ]
        for tune in options.tune:
            for way in options.ways:
                command = [sys.executable, "-m", "benchmarks.headline_h200", "--tune", tune, "--ways", way]
                subprocess.run([*command, "--limit-seconds", str(options.limit_seconds), *flags], check=False)
        return
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(simulated_accelerator()) if options.simulated else None
        peak_of = None if device is None else lambda: device.peak_bytes
        reset = bool if device is None else device.reset_peak
        for line in _measure(options, _H200 if device is None else _SIMULATED, peak_of, reset):
            print(line, flush=True)
            if options.output is not None:
                options.output.mkdir(parents=True, exist_ok=True)
                with (options.output / "headline.jsonl").open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
