"""The ways a user may treat a layer; each says what must be seen in the statistics afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.torch import AsyncSaveOnCpu
from hyper_parallel.core.activation_checkpoint.policy import ByOpName

_MATMULS = ("mm", "addmm", "bmm", "_grouped_mm")
SWAP_MATMULS = ByOpName(dict.fromkeys(_MATMULS, CheckpointPolicy.MUST_SWAP))
SAVE_AND_SWAP = ByOpName(
    {
        **dict.fromkeys(_MATMULS, CheckpointPolicy.MUST_SWAP),
        "_scaled_dot_product_flash_attention_for_cpu": CheckpointPolicy.MUST_SAVE,
        "native_dropout": CheckpointPolicy.MUST_SAVE,
        "_softmax": CheckpointPolicy.PREFER_SAVE,
    },
    otherwise=CheckpointPolicy.MUST_RECOMPUTE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Treatment:
    """How layers are wrapped, and what the whole forward runs under."""

    wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer
    around_forward: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    swaps: bool
    recomputes: bool
    has_regions: bool = False  # of checkpoint, also where nothing is left for them to recompute

    def __post_init__(self) -> None:
        assert self.has_regions or not self.recomputes


TREATMENTS: dict[str, Treatment] = {
    "swap": Treatment(wrap=hp.swap_wrapper, swaps=True, recomputes=False),
    "hooks_around_the_whole_forward": Treatment(around_forward=AsyncSaveOnCpu, swaps=True, recomputes=False),
    "checkpoint": Treatment(wrap=hp.checkpoint_wrapper, swaps=False, recomputes=True, has_regions=True),
    "checkpoint_swap_inputs": Treatment(
        wrap=lambda layer: hp.checkpoint_wrapper(layer, swap_inputs=True), swaps=True, recomputes=True, has_regions=True
    ),
    "save_listed_ops": Treatment(
        wrap=lambda layer: hp.checkpoint_wrapper(layer, policy_fn=list(_MATMULS)),
        swaps=False,
        recomputes=True,
        has_regions=True,
    ),
    "swap_matmuls": Treatment(
        wrap=lambda layer: hp.checkpoint_wrapper(layer, policy_fn=SWAP_MATMULS),
        swaps=True,
        recomputes=True,
        has_regions=True,
    ),
    "swap_save_recompute_and_inputs": Treatment(
        wrap=lambda layer: hp.checkpoint_wrapper(layer, policy_fn=SAVE_AND_SWAP, swap_inputs=True),
        swaps=True,
        recomputes=True,
        has_regions=True,
    ),
    # The innermost hooks win: what the swap took is never asked of the checkpoint, so nothing is replayed.
    "swap_inside_checkpoint": Treatment(
        wrap=lambda layer: hp.checkpoint_wrapper(hp.swap_wrapper(layer)), swaps=True, recomputes=False, has_regions=True
    ),
    "checkpoint_inside_swap": Treatment(
        wrap=lambda layer: hp.swap_wrapper(hp.checkpoint_wrapper(layer)), swaps=True, recomputes=True, has_regions=True
    ),
}
