"""Common cards: memory, link, compute and memory bandwidth, and which share of them a training step reaches.

Memory, bandwidth and compute (dense bf16, float32 accumulation) are from the vendors' data sheets; memory is what the driver
leaves of it. The link is what pinned copies reach over it. The shares were fitted to one case on one card, the 16-layer stack at
8,192 × 2 tokens on an H200 (``benchmarks/estimate.py`` makes them again from ``benchmarks/results/frontier_h200_202611.json``,
and a test compares): other cards may reach more or less.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from hyper_parallel.estimation.shape import near_misses

__all__ = ["CARDS", "Card", "Shares", "SHARES", "card_named"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """Which part of a card's data sheet a training step reaches."""

    matmul: float
    attention_forward: float
    attention_backward: float
    bandwidth: float


SHARES: Final = Shares(matmul=0.707, attention_forward=0.566, attention_backward=0.396, bandwidth=0.747)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator and its link to host memory."""

    name: str
    memory_bytes: int
    link_bytes_per_second: float
    flops: float
    """Dense bf16 operations per second, of the data sheet."""
    memory_bytes_per_second: float
    is_measured: bool = False
    """Whether estimates for it were compared with measured steps."""

    def __post_init__(self) -> None:
        for field in ("memory_bytes", "link_bytes_per_second", "flops", "memory_bytes_per_second"):
            if not getattr(self, field) > 0:
                raise ValueError(f"estimate: a card's {field} must be more than 0, got {getattr(self, field)!r}")


def _card(name: str, gib: float, link_gb: float, tflops: float, memory_gb: float, *, is_measured: bool = False) -> Card:
    return Card(
        name=name,
        memory_bytes=int(gib * 2**30),
        link_bytes_per_second=link_gb * 1e9,
        flops=tflops * 1e12,
        memory_bytes_per_second=memory_gb * 1e9,
        is_measured=is_measured,
    )


CARDS: Final = {
    card.name: card
    for card in (
        _card("h200", 139.8, 55.3, 989, 4800, is_measured=True),
        _card("h100", 79.1, 55, 989, 3350),
        _card("h100-pcie", 79.1, 55, 756, 2000),
        _card("h100-nvl", 93.1, 55, 835, 3900),
        _card("gh200", 94.5, 350, 989, 4000),
        _card("b200", 178, 55, 2250, 8000),
        _card("a100-80gb", 79.1, 25, 312, 2039),
        _card("a100-40gb", 39.4, 25, 312, 1555),
        _card("l40s", 44.4, 25, 362, 864),
        _card("l4", 22.0, 25, 121, 300),
        _card("a10", 22.0, 25, 125, 600),
        _card("rtx-a6000", 47.4, 25, 155, 768),
        _card("rtx-6000-ada", 47.4, 25, 364, 960),
        _card("rtx-3090", 23.6, 25, 71, 936),
        _card("rtx-4090", 23.5, 25, 165, 1008),
        _card("rtx-5090", 31.4, 50, 209, 1792),
        _card("mi300x", 191.5, 50, 1307, 5300),
    )
}
"""By name."""

_DRIVER_NAMES: Final = (
    (r"h200", "h200"),
    (r"gh200", "gh200"),
    (r"b200", "b200"),
    (r"h100.*nvl", "h100-nvl"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100", "h100"),
    (r"a100.*40", "a100-40gb"),
    (r"a100.*80", "a100-80gb"),
    (r"l40s", "l40s"),
    (r"l4\b", "l4"),
    (r"a10\b", "a10"),
    (r"rtx 6000 ada", "rtx-6000-ada"),
    (r"rtx a6000", "rtx-a6000"),
    (r"rtx 3090\b(?! ti)", "rtx-3090"),
    (r"rtx 4090\b(?! d)", "rtx-4090"),
    (r"rtx 5090\b(?! d)", "rtx-5090"),
    (r"mi300x", "mi300x"),
)
"""How drivers name these cards; the first pattern that is found as a word decides."""


def card_named(name: str) -> Card:
    """The card that a person or a driver calls this.

    Raises:
        ValueError: no card is called so; near misses are shown.
    """
    if not isinstance(name, str):
        raise TypeError(f"estimate: card must be a name such as 'h200' or a Card, got {name!r}")
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    if word in CARDS:
        return CARDS[word]
    for pattern, known in _DRIVER_NAMES:
        if re.search(rf"\b{pattern}", name.lower()):
            return CARDS[known]
    raise ValueError(
        f"estimate: unknown card {name!r}{near_misses(word, CARDS, otherwise='.')} Known are {', '.join(CARDS)}; for another "
        "one give a Card(name=..., memory_bytes=..., link_bytes_per_second=..., flops=..., memory_bytes_per_second=...)."
    )
