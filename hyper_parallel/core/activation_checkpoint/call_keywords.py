"""The keywords of a wrapper's call, kept apart from the settings of the function that the call goes through.

A checkpoint function takes its settings and the keywords of the region in one list: ``checkpoint(f, x, debug=True)`` sets
``debug`` of the checkpoint. At a wrapper's call every keyword is the module's, also one of these names. Such a keyword
travels under an alias that no parameter can have, and gets its name back just before the module is called. Its value stays
an ordinary keyword on the way, so that tensors in it are found, swapped and replayed like all others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Final

__all__ = ["CHECKPOINT_SETTINGS", "SWAP_SETTINGS", "keep_apart", "parameter_names"]

CHECKPOINT_SETTINGS: Final = frozenset(
    {
        "function",
        "swap_inputs",
        "policy_fn",
        "context_fn",
        "early_stop",
        "swap_config",
        "use_reentrant",
        # torch.utils.checkpoint
        "preserve_rng_state",
        "determinism_check",
        "debug",
        "fn",
        # mindspore.recompute
        "block",
        "output_recompute",
        "save_rng_state",
    }
)
"""What a checkpoint function of ours, of torch or of MindSpore may read as its own."""
SWAP_SETTINGS: Final = frozenset({"function", "policy_fn", "swap_config"})

_ALIAS: Final = "keyword of the module: "


def parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """The names that ``function`` itself takes as keywords; empty where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def keep_apart(
    module: Callable[..., Any], kwargs: dict[str, Any], taken: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """``module`` and ``kwargs`` such that none of the names in ``taken`` is a key of ``kwargs`` any more."""
    if not any(name in taken for name in kwargs):
        return module, kwargs
    return _Renaming(module), {_ALIAS + name if name in taken else name: value for name, value in kwargs.items()}


class _Renaming:
    """The module, called with every keyword under its own name."""

    def __init__(self, module: Callable[..., Any]) -> None:
        self.__self__ = module  # as a bound method has it: errors name the module, and its parameters are known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # An aliased keyword comes last: it replaces one of the same name that the wrapper was made with.
        own = {name: value for name, value in kwargs.items() if not name.startswith(_ALIAS)}
        own.update((name.removeprefix(_ALIAS), value) for name, value in kwargs.items() if name.startswith(_ALIAS))
        return self.__self__(*args, **own)
