"""The shape of a decoder: every number from which its memory and its work follow."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Final

__all__ = ["KERNELS", "ModelShape", "near_misses"]

KERNELS: Final = ("torch", "transformers", "liger")
"""Which kernels run the element-wise ops: ``torch``, one kernel for a norm, queries, keys and values from one matrix, and no
loss; ``transformers``, norms in float32 from seven small ops, and the logits in float32; ``liger``, the fused kernels of
Liger, whose loss keeps no logits."""

_LARGEST: Final = 10**9
_COUNTS: Final = ("width", "layers", "heads", "kv_heads", "head_width", "hidden")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One decoder. ``kv_heads`` and ``head_width`` of 0 mean: as many as heads, and width / heads."""

    width: int
    layers: int
    heads: int
    hidden: int
    """The width inside the MLP; of one expert, where there are experts."""
    kv_heads: int = 0
    head_width: int = 0
    vocabulary: int = 0
    """0: the layers alone, without an embedding and a loss."""
    experts: int = 0
    experts_per_token: int = 0
    is_gated: bool = True
    """Whether the MLP multiplies an activated gate with a second matrix's output (SwiGLU)."""
    has_rotary: bool = True
    has_qk_norm: bool = False
    has_tied_embedding: bool = False
    lora_rank: int = 0
    """0: every weight is trained."""
    has_float32_adapters: bool = False
    """Whether LoRA's matrices are float32 over weights of 2 bytes. PEFT makes them so unless it is told
    ``autocast_adapter_dtype=False``; every linear then saves a float32 copy of its input."""
    kernels: str = "transformers"

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_width and isinstance(self.heads, int) and self.heads > 0:
            object.__setattr__(self, "head_width", self.width // self.heads)
        for name in _COUNTS:
            _require_count(name, getattr(self, name), least=1)
        for name in ("vocabulary", "experts", "experts_per_token", "lora_rank"):
            _require_count(name, getattr(self, name), least=0)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"estimate: {self.heads} heads cannot share {self.kv_heads} key-value heads evenly; heads must be a multiple"
            )
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            raise ValueError(
                f"estimate: a model with {self.experts} experts cannot send each token to {self.experts_per_token} of them; give "
                "both numbers, experts_per_token no larger than experts, or neither"
            )
        if self.has_float32_adapters and not self.lora_rank:
            raise ValueError(
                "estimate: float32 adapters were asked for, and there are no adapters; give a lora_rank as well"
            )
        if self.kernels not in KERNELS:
            raise ValueError(
                f"estimate: unknown kernels {self.kernels!r}; known are {', '.join(KERNELS)}"
                f"{near_misses(self.kernels, KERNELS)}"
            )

    @property
    def query_width(self) -> int:
        """Of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Of all key heads together; values have as much again."""
        return self.kv_heads * self.head_width

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of every linear in the attention and, without experts, in the MLP of one layer."""
        attention = (
            (self.width, self.query_width),
            (self.width, self.kv_width),
            (self.width, self.kv_width),
            (self.query_width, self.width),
        )
        return attention if self.experts else attention + self.mlp_linears

    @property
    def mlp_linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of every linear of one MLP, or of one expert."""
        inward = (self.width, self.hidden)
        return (inward, inward, (self.hidden, self.width)) if self.is_gated else (inward, (self.hidden, self.width))

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer."""
        expert = sum(inner * outer for inner, outer in self.mlp_linears)
        routed = self.experts * expert + self.width * self.experts
        return sum(inner * outer for inner, outer in self.linears) + routed + 2 * self.width

    @property
    def parameters(self) -> int:
        """All weights, adapters not among them."""
        tables = 1 if self.has_tied_embedding else 2
        outside = (tables * self.vocabulary * self.width + self.width) if self.vocabulary else 0
        return self.layers * self.layer_parameters + outside

    @property
    def adapter_parameters(self) -> int:
        """Weights of LoRA's two matrices on every linear; with experts, on the attention's linears only."""
        return self.layers * self.lora_rank * sum(inner + outer for inner, outer in self.linears)

    @property
    def trained_parameters(self) -> int:
        """Those that get a gradient."""
        return self.adapter_parameters if self.lora_rank else self.parameters


def _require_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"estimate: {name} must be a whole number, got {value!r}")
    if not least <= value <= _LARGEST:
        raise ValueError(f"estimate: {name} is {value}; it must be {least} or more, and at most {_LARGEST}")


def near_misses(word: object, known: Iterable[str], *, otherwise: str = "") -> str:
    """``; did you mean ...?`` where some known word is close."""
    close = difflib.get_close_matches(str(word), list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else otherwise
