"""Key-value caches of transformers inside replayed regions.

Transformers leaves its cache on by default, also in training, and every layer appends to it. A replay would append a second
time. So each run of a region, forward or replay, gets the cache as it was before, in a copy of its own: the values are
those of the plain step, and nobody keeps them. Without gradients nothing is replayed, and the caller's cache is filled:
``generate`` reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["with_own_cache"]


def with_own_cache(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function, each run of which writes into a cache of its own, where this call has one."""
    if not torch.is_grad_enabled():
        return function
    if not any(map(_is_cache, args)) and not any(map(_is_cache, kwargs.values())):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_own(value) for value in args)
        return function(*args, **{name: _own(value) for name, value in kwargs.items()})

    run.__self__ = function  # type: ignore[attr-defined]  # errors name a region by the owner of its function
    return run


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
