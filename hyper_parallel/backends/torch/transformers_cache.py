"""Key-value caches of transformers inside recomputed regions.

Transformers leaves its cache on by default, also in training, and every layer appends to it. A region that runs from a tape
appends once, and needs nothing. A replay that runs Python again would append a second time, and the cache would keep every
layer's keys and values on the device. So each run of such a region, forward or replay, gets the cache as it was before, in a
copy of its own: the values are those of the plain step, and nothing keeps them. Without gradients nothing is replayed, and
the caller's cache is filled: ``generate`` reads it. A cache that was left empty in this way is remembered, and refused when
a later forward goes on with it, because the values would silently differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch

from hyper_parallel.errors import PlanError

__all__ = ["is_cache", "refuse_left_out_caches", "with_own_cache"]

_LEFT_OUT: Final = "_hyper_parallel_left_out"


def with_own_cache(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The function, each run of which writes into a cache of its own, where this call has one."""
    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if not caches:
        return function
    for cache in caches:
        _refuse_left_out(cache, function)
    if not torch.is_grad_enabled():
        return function
    for cache in caches:
        _remember_left_out(cache, function)

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_own(value) for value in args)
        return function(*args, **{name: _own(value) for name, value in kwargs.items()})

    run.__self__ = function  # type: ignore[attr-defined]  # errors name a region by the owner of its function
    return run


def refuse_left_out_caches(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    """Raise where a call has a cache that an earlier call of this module left as it was."""
    for value in (*args, *kwargs.values()):
        if is_cache(value):
            _refuse_left_out(value, function)


def _remember_left_out(cache: Any, function: Any) -> None:
    """The cache misses what this module would have appended."""
    module = getattr(function, "__self__", function)
    if isinstance(module, torch.nn.Module):  # a function has no identity that a second call would share
        vars(cache)[_LEFT_OUT] = vars(cache).get(_LEFT_OUT, set()) | {id(module)}


def _refuse_left_out(cache: Any, function: Any) -> None:
    module = getattr(function, "__self__", function)
    if id(module) in vars(cache).get(_LEFT_OUT, ()):
        raise PlanError(
            f"{type(module).__name__}: cannot go on with a key-value cache that it saw before in a forward with gradients, "
            "because that forward is replayed and left the cache as it was. Give every such forward a cache of its own "
            "(use_cache=False gives none), run the earlier one under torch.no_grad(), or use hp.swap_wrapper, which replays "
            "nothing."
        )


def _own(value: Any) -> Any:
    return _copied(value) if is_cache(value) else value


def _copied(part: Any) -> Any:
    """A copy of a cache, its layers and their containers; tensors are shared, because a layer replaces them when it grows."""
    if isinstance(part, list):
        return [_copied(item) for item in part]
    if isinstance(part, dict):
        items = copy.copy(part)
        items.update({key: _copied(value) for key, value in part.items()})
        return items
    if not _is_of_transformers(part):
        return part
    same = copy.copy(part)
    for name, value in vars(same).items():
        vars(same)[name] = _copied(value)
    return same


def _is_of_transformers(part: Any) -> bool:
    names = getattr(part, "__dict__", None)
    is_config = hasattr(part, "model_type")
    return names is not None and not is_config and type(part).__module__.startswith("transformers.")


def is_cache(value: Any) -> bool:
    """Whether a value is one of transformers' caches."""
    kind = type(value)
    if kind.__module__ in ("builtins", "torch"):
        return False
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in kind.__mro__[:-1])
