"""Key-value caches of transformers inside replayed regions.

Transformers leaves its cache on by default, also in training, and every layer appends to it. A replay would append a second
time. So each run of a region, forward or replay, gets the cache as it was before, in a copy of its own: the values are
those of the plain step, and nobody keeps them. Without gradients nothing is replayed, and the caller's cache is filled:
``generate`` reads it. A cache that was left empty so is remembered, and refused when somebody goes on with it: the values
would be others, and nobody would know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch

from hyper_parallel.errors import PlanError

__all__ = ["with_own_cache"]

_LEFT_OUT: Final = "_hyper_parallel_left_out"


def with_own_cache(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function, each run of which writes into a cache of its own, where this call has one."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    for cache in caches:
        _refuse_left_out(cache, function)
    if not caches or not torch.is_grad_enabled():
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_own(value) for value in args)
        return function(*args, **{name: _own(value) for name, value in kwargs.items()})

    run.__self__ = function  # type: ignore[attr-defined]  # errors name a region by the owner of its function
    return run


def _refuse_left_out(cache: Any, module: Any) -> None:
    """The first call of a module with gradients notes that the cache misses it; the second finds the note."""
    if not isinstance(module, torch.nn.Module):
        return  # a trial's own function, which has no identity
    left_out: set[int] = vars(cache).get(_LEFT_OUT, set())
    if id(module) in left_out:
        raise PlanError(
            f"{type(module).__name__}: cannot go on with a key-value cache that it saw before in a forward with gradients, "
            "because that forward is replayed and left the cache as it was. Give every such forward a cache of its own "
            "(use_cache=False gives none), run the earlier one under torch.no_grad(), or use hp.swap_wrapper, which replays "
            "nothing."
        )
    if torch.is_grad_enabled():
        vars(cache)[_LEFT_OUT] = left_out | {id(module)}


def _own(value: Any) -> Any:
    if not _is_cache(value):
        return value
    twin = copy.copy(value)
    for name, part in vars(twin).items():
        if isinstance(part, list):
            setattr(
                twin, name, [copy.copy(item) for item in part]
            )  # a layer's part is replaced when it grows, never changed
        elif isinstance(part, dict):
            setattr(twin, name, dict(part))
        else:
            setattr(twin, name, _own(part))
    return twin


def _is_cache(value: Any) -> bool:
    return any(
        base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in type(value).__mro__[:-1]
    )
