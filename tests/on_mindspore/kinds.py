"""The ways to put the engine around a model, as values: one scenario runs under all of them. The names are torch's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import mindspore

import hyper_parallel as hp
from hyper_parallel import CheckpointPolicy
from hyper_parallel.backends.mindspore import AsyncSaveOnCpu

__all__ = ["KINDS", "MAIN", "PLAIN", "RECOMPUTE", "SEEDED", "Kind", "mixed_policy", "swap_everything"]


def _same(layer: Any) -> Any:
    return layer


def _call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the engine is put around a model."""

    name: str
    layer: Callable[[Any], Any] = _same
    forward: Callable[..., Any] = _call
    recomputes: bool = False
    files_outputs: bool = False  # a selective policy keeps op outputs, so it may refuse a change outside its region

    def __repr__(self) -> str:
        return self.name


_CYCLE = (
    CheckpointPolicy.MUST_SWAP,
    CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_RECOMPUTE,
    CheckpointPolicy.PREFER_SAVE,
)


def mixed_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """All five answers, by the op's name and the shapes it reads: the same in every run, and stateless."""
    shapes = sum(sum(arg.shape) for arg in args if isinstance(arg, mindspore.Tensor))
    return _CYCLE[(sum(map(ord, op.name)) + shapes) % len(_CYCLE)]


def swap_everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SWAP


def _matmuls_swap_rest_saved(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = "MatMul" in op.name or op.name == "Dense"
    return CheckpointPolicy.MUST_SWAP if is_product else CheckpointPolicy.MUST_SAVE


def _half_swapped(tensor: Any) -> Any:
    """Every answer a tensor policy may give, by the number of elements."""
    answers = (CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_SAVE, None, CheckpointPolicy.PREFER_SAVE)
    return answers[tensor.size % len(answers)]


class _Recomputed(mindspore.nn.Cell):
    """MindSpore's own recompute around a layer."""

    def __init__(self, layer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.inner = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return mindspore.recompute(self.inner, *args, use_reentrant=False, early_stop=False, **kwargs)


def _under_async_save(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with AsyncSaveOnCpu():
        return model(*args, **kwargs)


PLAIN = Kind("plain")
RECOMPUTE = Kind("mindspore_recompute", _Recomputed, recomputes=True)

_swapping_inputs = functools.partial(hp.checkpoint_wrapper, swap_inputs=True)
_mixed = functools.partial(hp.checkpoint_wrapper, policy_fn=mixed_policy, swap_inputs=True)
_all_swapped = functools.partial(hp.checkpoint_wrapper, policy_fn=swap_everything)

KINDS: tuple[Kind, ...] = (
    Kind("swap", hp.swap_wrapper),
    Kind("swap_by_policy", functools.partial(hp.swap_wrapper, policy_fn=_half_swapped)),
    Kind("checkpoint", hp.checkpoint_wrapper, recomputes=True),
    Kind("swap_inputs", _swapping_inputs, recomputes=True),
    Kind("mixed", _mixed, recomputes=True, files_outputs=True),
    Kind("all_swapped", _all_swapped, recomputes=True, files_outputs=True),
    Kind(
        "matmuls_swapped_rest_saved",
        functools.partial(hp.checkpoint_wrapper, policy_fn=_matmuls_swap_rest_saved),
        recomputes=True,
        files_outputs=True,
    ),
    Kind(
        "op_list",
        functools.partial(hp.checkpoint_wrapper, policy_fn=["MatMul", "Dense", "MatMulExt"], swap_inputs=True),
        recomputes=True,
        files_outputs=True,
    ),
    Kind("swap_in_checkpoint", lambda m: _swapping_inputs(hp.swap_wrapper(m)), recomputes=True),
    Kind("checkpoint_in_swap", lambda m: hp.swap_wrapper(_mixed(m)), recomputes=True, files_outputs=True),
    Kind("checkpoint_in_checkpoint", lambda m: _mixed(_all_swapped(m)), recomputes=True, files_outputs=True),
    Kind("async_save_around", forward=_under_async_save),
    Kind("mixed_in_async_save", _mixed, _under_async_save, recomputes=True, files_outputs=True),
)
_MAIN = ("swap", "checkpoint", "swap_inputs", "mixed", "all_swapped", "checkpoint_in_swap", "async_save_around")
MAIN = tuple(kind for kind in KINDS if kind.name in _MAIN)
SEEDED = tuple(kind for kind in KINDS if kind.name in ("swap", "mixed", "all_swapped"))
