"""A Hugging Face ``config.json``, read as plain JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.estimation.shape import ModelShape, near_misses

__all__ = ["shape_from_config", "shape_from_file"]

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "width": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "hidden": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocabulary": ("vocab_size",),
}
"""What a config must say, and the names that it goes by."""
_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_NOT_GATED: Final = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2", "mpt"}
)
_HAS_QK_NORM: Final = ("qwen3", "olmo2", "olmo3", "gemma3")
_FOUR_TIMES: Final = frozenset({"gpt2", "gptj", "gpt_neo", "gpt_bigcode", "bloom", "falcon", "mpt"})
_LARGEST_FILE_BYTES: Final = 16 * 2**20


def shape_from_file(path: str | os.PathLike[str]) -> ModelShape:
    """The shape that a ``config.json``, or the folder that holds one, describes.

    Raises:
        ValueError: it is no JSON object, or a number that is needed is missing; near misses are shown.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        name = os.path.join(name, "config.json")
    if os.path.getsize(name) > _LARGEST_FILE_BYTES:
        raise ValueError(f"estimate: {name} is {os.path.getsize(name)} bytes long; that is no model's config.json")
    with open(name, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"estimate: cannot read {name} as JSON: {error}") from None
    return shape_from_config(config, source=name)


def shape_from_config(config: Any, *, source: str = "the config") -> ModelShape:
    """The shape that the content of a ``config.json`` describes. ``source`` is what errors call it."""
    if not isinstance(config, Mapping):
        raise ValueError(f"estimate: {source} must hold a JSON object, got {type(config).__name__}")
    text = config.get("text_config")
    if isinstance(text, Mapping):  # a model of text and images; its decoder is what is estimated
        config = text
    kind = str(config.get("model_type", ""))
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"estimate: {source} ({kind or 'no model_type'}) has kv_lora_rank: multi-head latent attention is not estimated. "
            "Measure a step instead: hyper-parallel profile"
        )
    found: dict[str, Any] = {field: _number(config, names, source, kind) for field, names in _KEYS.items()}
    experts = next((value for name in _EXPERTS if (value := _whole(config, name, source))), 0)
    if experts:
        found["hidden"] = _whole(config, "moe_intermediate_size", source) or found["hidden"]
        found["experts_per_token"] = _number(config, ("num_experts_per_tok",), source, kind)
    return ModelShape(
        **found,
        kv_heads=_whole(config, "num_key_value_heads", source),
        head_width=_whole(config, "head_dim", source),
        experts=experts,
        is_gated=kind not in _NOT_GATED,
        has_rotary=kind not in ("gpt2", "opt", "bloom", "gpt_bigcode", "mpt"),
        has_qk_norm=kind.startswith(_HAS_QK_NORM),
        has_tied_embedding=config.get("tie_word_embeddings") is True,
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...], source: str, kind: str) -> int:
    for name in names:
        value = _whole(config, name, source)
        if value:
            return value
    if "n_inner" in names and kind in _FOUR_TIMES:
        return 4 * _number(config, _KEYS["width"], source, kind)
    numbers = [key for key, value in config.items() if isinstance(value, int) and not isinstance(value, bool)]
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    raise ValueError(
        f"estimate: {source} has no {names[0]!r}{others}, and the estimate needs it"
        f"{near_misses(names[0], numbers, otherwise='.')} Its whole numbers are: {', '.join(sorted(numbers)[:16]) or 'none'}."
    )


def _whole(config: Mapping[str, Any], name: str, source: str) -> int:
    """The value of a key; 0 where it is missing or null."""
    value = config.get(name)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"estimate: {name!r} in {source} must be a whole number, got {value!r}")
    return value
