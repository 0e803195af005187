"""Checks of what ``checkpoint``, ``swap`` and their wrappers are given, made as early as possible.

A keyword that is no setting of ours belongs to the wrapped function, so a mistyped setting would be passed on. Where the
function takes any keyword (``**kwargs``) nothing would ever complain. So a keyword that differs from a setting by a few
letters is refused, unless the function itself has a parameter of that name.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.config import SwapConfig
from hyper_parallel.core.activation_checkpoint.adapter import TensorAdapter
from hyper_parallel.core.activation_checkpoint.call_keywords import CHECKPOINT_SETTINGS
from hyper_parallel.errors import PolicyError

__all__ = ["check_call_keywords", "check_swap_config", "check_tensor_policy", "check_wrapper_keywords", "label_of"]

_OTHERS_NAMES: Final = frozenset(
    {"function", "fn", "block"}
)  # passed by position, so a keyword of such a name is the module's
_SETTINGS: Final = sorted(CHECKPOINT_SETTINGS - _OTHERS_NAMES)
_SHOWN: Final = "swap_inputs, policy_fn, context_fn, early_stop, swap_config, use_reentrant, preserve_rng_state, debug"
_NEAR: Final = 0.75  # of a keyword that a wrapper is made with
_VERY_NEAR: Final = 0.88  # of a keyword at a call, where the function's own keywords are usual


def label_of(function: Any, tensors: TensorAdapter) -> str:
    """The function or module as errors name it."""
    label = tensors.module_label(function)  # asked first: a module takes long to say that it has no `__self__`
    if label is None:
        label = tensors.module_label(getattr(function, "__self__", None))
    return str(getattr(function, "__qualname__", type(function).__name__)) if label is None else label


def check_wrapper_keywords(module: Any, keywords: dict[str, Any], tensors: TensorAdapter) -> dict[str, Any]:
    """Refuse what a ``checkpoint_wrapper`` cannot have been meant to get.

    Returns:
        The keywords; a list of ops in them is a policy now.

    Raises:
        TypeError: a keyword that is neither a setting nor an argument of the module, or a value of a wrong type.
        PolicyError: a policy that is none, or that names an op which does not exist.
    """
    from hyper_parallel.core.activation_checkpoint.policy import as_op_policy

    who = "checkpoint_wrapper"
    unknown = [name for name in keywords if name not in CHECKPOINT_SETTINGS]
    if unknown:
        named, takes_any = _parameters_of(module)
        for name in unknown:
            _check_unknown(who, name, named, takes_any=takes_any)
    check_swap_config(who, keywords.get("swap_config"))
    for name in ("swap_inputs", "early_stop"):
        value = keywords.get(name, False)
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name} must be True or False, got {value!r}")
    context_fn = keywords.get("context_fn")
    if context_fn is not None and not callable(context_fn):
        raise TypeError(f"{who}: context_fn must be a function that returns two contexts, got {context_fn!r}")
    if keywords.get("policy_fn") is None:
        return keywords
    where = f"checkpoint of {label_of(module, tensors)}"
    return {
        **keywords,
        "policy_fn": as_op_policy(keywords["policy_fn"], where=where, check_names=tensors.check_op_names),
    }


def _check_unknown(who: str, name: str, named: frozenset[str], *, takes_any: bool) -> None:
    if name in named:
        return
    near = _setting_near(name, _NEAR)
    if near is not None:
        raise TypeError(
            f"{who}: {name!r} is not a setting; did you mean {near!r}? If it is an argument of the wrapped module, "
            f"bind it with functools.partial(module, {name}=...). Settings are {_SHOWN}."
        )
    if not takes_any:
        raise TypeError(
            f"{who}: {name!r} is neither a setting nor an argument of the wrapped module. Settings are {_SHOWN}."
        )


def check_call_keywords(who: str, function: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse keywords of a call of ``checkpoint`` or ``swap`` that are almost a setting.

    Raises:
        TypeError: the function has no parameter of that name, and a setting differs from it by a letter or two.
    """
    for name in keywords:
        if name in CHECKPOINT_SETTINGS:
            continue
        near = _setting_near(name, _VERY_NEAR)
        if near is not None and name not in _parameters_of(function)[0]:
            raise TypeError(
                f"{who}: {name!r} is not a setting; did you mean {near!r}? If it is an argument of the function, bind it "
                f"with functools.partial(function, {name}=...)."
            )


def check_swap_config(who: str, swap_config: Any) -> None:
    """Refuse settings that are no ``SwapConfig``.

    Raises:
        TypeError: they are something else, such as a dict.
    """
    if swap_config is None or isinstance(swap_config, SwapConfig):
        return
    if isinstance(swap_config, Mapping):
        inside = ", ".join(f"{name}={value!r}" for name, value in swap_config.items())
        raise TypeError(f"{who}: swap_config must be a SwapConfig, got a dict; write hp.SwapConfig({inside})")
    raise TypeError(
        f"{who}: swap_config must be a SwapConfig, such as hp.SwapConfig(min_bytes='4MiB'), got {swap_config!r}"
    )


def check_tensor_policy(who: str, policy_fn: Any) -> None:
    """Refuse a policy of tensors that cannot be called.

    Raises:
        PolicyError: it is no function.
    """
    if policy_fn is not None and not callable(policy_fn):
        raise PolicyError(f"{who}: the tensor policy must be a function of one tensor, got {policy_fn!r}")


@functools.lru_cache(maxsize=512)
def _setting_near(name: str, cutoff: float) -> str | None:
    """The setting that ``name`` is almost, seen without underscores and capitals."""
    plain = {setting.replace("_", ""): setting for setting in _SETTINGS}
    found = difflib.get_close_matches(name.replace("_", "").lower(), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _parameters_of(function: Any) -> tuple[frozenset[str], bool]:
    """The parameters that a module or function can be given by keyword, and whether it takes any other."""
    innermost = getattr(type(function), "_innermost", None)  # a wrapper of ours
    if innermost is not None:
        function = innermost(function)
    called = getattr(function, "forward", None) or getattr(function, "construct", None) or function
    fn = getattr(function, "fn", None)  # a plain callable that was made a module
    if callable(fn) and type(function).__name__ in ("FuncModule", "FuncCell"):
        called = fn
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)
    return named, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
