"""Estimate what a training step takes, plain and with this library. Needs no device and no framework.

The model is a Hugging Face config.json, or its shape in numbers. Ways: plain; recompute (every layer runs again in backward);
inputs (the same, and layer inputs wait in host memory); swap (whole layers in host memory, as many as the link hides); plan (a
mix for a budget). For each: peak, step time against the plain step, longest sequence and largest batch on the card.

Example::

  hyper-parallel estimate --config config.json --tokens 8192 --card a100-80gb --lora 16
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final

from hyper_parallel.cli.console import Console
from hyper_parallel.cli.factory import positive
from hyper_parallel.cli.failures import CommandError, UsageError
from hyper_parallel.config import parse_bytes, show_bytes
from hyper_parallel.estimation.cards import CARDS, Card, card_named
from hyper_parallel.estimation.estimate import OPTIMIZERS, USABLE_SHARE, Estimate, estimate, summary_rows
from hyper_parallel.estimation.shape import KERNELS, ModelShape

__all__ = ["add_arguments", "run"]

_NUMBERS: Final = {
    "width": "of the residual stream (hidden_size)",
    "layers": "decoder layers",
    "heads": "query heads",
    "hidden": "width inside the MLP, or inside one expert",
    "kv-heads": "key-value heads; as many as heads by default",
    "head-width": "of one head; width / heads by default",
    "vocabulary": "0 by default: the layers alone",
    "experts": "in each layer; none by default",
    "experts-per-token": "of them",
}
_REQUIRED: Final = ("width", "layers", "heads", "hidden")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("--config", metavar="FILE", help="a Hugging Face config.json, or the folder that holds it")
    for name, words in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=words)
    parser.add_argument("--no-gate", action="store_true", help="the MLP has no gate (GPT-2's has none)")
    parser.add_argument("--lora", type=positive, metavar="RANK", help="train adapters of this rank on every linear")
    parser.add_argument(
        "--lora-float32", action="store_true", help="adapters in float32, as PEFT makes them by default"
    )
    parser.add_argument("--kernels", choices=KERNELS, help="which kernels run norms and loss (default transformers)")
    parser.add_argument("--tokens", type=positive, metavar="N", required=True, help="of one sequence")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences in a step (default 1)")
    parser.add_argument("--dtype", default="bf16", help="bf16 or fp16 (default bf16)")
    parser.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="default adamw")
    parser.add_argument("--card", metavar="NAME", help=f"default h200; known: {', '.join(CARDS)}")
    parser.add_argument(
        "--here", action="store_true", help="the card in this machine; its memory and link are measured"
    )
    parser.add_argument("--memory", metavar="BYTES", help="of the card, in place of the table's: 40GiB")
    parser.add_argument("--link", metavar="BYTES", help="each second to host memory, in place of the table's: 25GB")
    parser.add_argument("--budget", metavar="BYTES", help="for plan: the peak to keep, weights included, such as 20GiB")


def run(args: argparse.Namespace, console: Console) -> int:
    """The command."""
    found = estimate(
        _model(args),
        tokens=args.tokens,
        batch=args.batch,
        card=_card(args, console),
        dtype=args.dtype,
        optimizer=args.optimizer,
        lora_rank=args.lora,
        has_float32_adapters=args.lora_float32 or None,
        kernels=args.kernels,
        budget=args.budget,
    )
    console.data(found.to_json())
    _show(found, console)
    return 0


def _model(args: argparse.Namespace) -> ModelShape | str:
    given: dict[str, Any] = {
        name.replace("-", "_"): value
        for name in _NUMBERS
        if (value := getattr(args, name.replace("-", "_"))) is not None
    }
    if args.config is not None:
        if given or args.no_gate:
            raise UsageError("--config says what the model is; leave out the numbers of its shape, or --config")
        path: str = args.config
        return path
    missing = [f"--{name}" for name in _REQUIRED if name not in given]
    if missing:
        raise UsageError(f"the model is not known: give --config config.json, or {', '.join(missing)} as well")
    return ModelShape(**given, is_gated=not args.no_gate)


def _card(args: argparse.Namespace, console: Console) -> Card:
    if args.here and args.card is not None:
        raise UsageError("--here is the card in this machine; leave it out, or --card")
    if args.here:
        with console.waiting("measuring the link to the card"):
            card = _card_here()
    else:
        card = card_named(args.card or "h200")
    changes: dict[str, Any] = {}
    if args.memory is not None:
        changes["memory_bytes"] = parse_bytes(args.memory, name="--memory")
    if args.link is not None:
        changes["link_bytes_per_second"] = float(parse_bytes(args.link, name="--link"))
    return dataclasses.replace(card, **changes)


def _card_here() -> Card:
    """The first accelerator that ``doctor`` sees: memory and link as measured, compute and bandwidth from the table."""
    try:
        from hyper_parallel.backends.torch import machine
    except (ImportError, OSError) as error:
        raise CommandError(
            f"--here measures with torch, which cannot be used: {error}. Name a --card instead."
        ) from None
    found = machine.accelerators()
    if not found:
        raise CommandError("--here: torch sees no accelerator in this machine; name a --card instead")
    device = found[0]
    return dataclasses.replace(
        card_named(device.name),
        memory_bytes=device.memory_bytes,
        link_bytes_per_second=min(device.out_bytes_per_second, device.in_bytes_per_second),
    )


def _show(found: Estimate, console: Console) -> None:
    shape, card = found.shape, found.card
    trained = f"LoRA of rank {shape.lora_rank}" if shape.lora_rank else "every weight trained"
    console.say(
        f"{shape.parameters / 1e9:.2f} billion weights, {shape.layers} layers, {trained}, {found.tokens:,} tokens × {found.batch}"
    )
    console.say(
        f"weights {show_bytes(found.weight_bytes)}, gradients {show_bytes(found.gradient_bytes)}, optimizer states "
        f"{show_bytes(found.optimizer_bytes)} ({found.optimizer})"
    )
    usable = show_bytes(USABLE_SHARE * card.memory_bytes)
    console.say(
        f"{card.name}: {usable} of {show_bytes(card.memory_bytes)} used, link {card.link_bytes_per_second / 1e9:.0f} GB/s"
    )
    heads, rows = summary_rows(found)
    console.table("Estimated", heads, rows)
    for one in found.ways[1:]:
        far = f" ({show_bytes(one.host_bytes)} of host memory)" if one.host_bytes else ""
        console.say(f"{one.name}: {one.how}{far}")
    for note in found.notes:
        console.say(note)
