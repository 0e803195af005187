"""The public functions: save, recompute or swap what a function or module keeps for its backward.

Each of them resolves the platform when it is called and calls the function of the same name in that framework's backend
(``hyper_parallel.backends.<framework>``). Nothing here imports a framework.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.core.activation_checkpoint import adapter, setting_checks
from hyper_parallel.platform.eager import run_eagerly

if TYPE_CHECKING:
    from hyper_parallel.config import SwapConfig

Output = TypeVar("Output")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])
Tree = TypeVar("Tree")

__all__ = ["CheckpointPolicy", "checkpoint", "checkpoint_wrapper", "swap", "swap_tensor_wrapper", "swap_wrapper"]


class CheckpointPolicy(enum.Enum):
    """What becomes of one op's output. Never compare by value with a framework's own enum: its numbers differ."""

    MUST_SAVE = 0  # stays on the device
    PREFER_SAVE = 1  # stays, unless a budget overrules it
    MUST_RECOMPUTE = 2  # is run again in backward
    PREFER_RECOMPUTE = 3  # is run again, unless a budget overrules it
    MUST_SWAP = 4  # its bytes are never recomputed: they go to far memory, or stay for a reason that is counted


@run_eagerly
def checkpoint(
    function: Callable[..., Output],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    early_stop: bool = True,
    swap_config: SwapConfig | None = None,
    **kwargs: Any,
) -> Output:
    """Run ``function(*args, **kwargs)`` and keep only what ``policy_fn`` says for its backward.

    Args:
        function: a module or any callable.
        *args: its arguments.
        swap_inputs: swap the region's inputs to far memory, also those in keywords and nested ones.
        policy_fn: ``policy_fn(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool``, or a list of ops or op names to
            save while the rest is recomputed. None recomputes everything.
        context_fn: a factory of a (forward, recompute) pair of contexts, put around the policy's own.
        early_stop: stop the replay once everything that backward needs is there.
        swap_config: settings for this region only.
        **kwargs: the function's keywords; ``use_reentrant`` (False only), ``preserve_rng_state``,
            ``determinism_check`` and ``debug`` go to the framework's own checkpoint.

    Returns:
        What ``function`` returned. Gradients are bitwise those of the framework's own checkpoint.
    """
    _check("checkpoint", function, swap_config, kwargs)
    output: Output = _backend().checkpoint(
        function,
        *args,
        swap_inputs=swap_inputs,
        policy_fn=policy_fn,
        context_fn=context_fn,
        early_stop=early_stop,
        swap_config=swap_config,
        **kwargs,
    )
    return output


def checkpoint_wrapper(module: Wrapped, **keywords: Any) -> Wrapped:
    """A module (or callable) whose every call goes through :func:`checkpoint` with these keywords.

    The wrapper leaves no trace: parameter names, ``state_dict``, attribute access, ``deepcopy`` and pickling are those
    of the wrapped module.
    """
    wrapper: Wrapped = _backend().checkpoint_wrapper(module, **keywords)
    return wrapper


@run_eagerly
def swap(
    function: Callable[..., Output],
    *args: Any,
    policy_fn: Any = None,
    swap_config: SwapConfig | None = None,
    **kwargs: Any,
) -> Output:
    """Run ``function(*args, **kwargs)``; what it saves for backward goes to far memory and comes back in time.

    ``policy_fn(tensor)`` chooses per tensor: MUST_SAVE, PREFER_SAVE or ActivationPolicy.SAVE keep it on the device;
    MUST_SWAP, ActivationPolicy.SWAP or None swap it.
    """
    _check("swap", function, swap_config, kwargs)
    output: Output = _backend().swap(function, *args, policy_fn=policy_fn, swap_config=swap_config, **kwargs)
    return output


def swap_wrapper(module: Wrapped, policy_fn: Any = None, *, swap_config: SwapConfig | None = None) -> Wrapped:
    """A module (or callable) whose every call goes through :func:`swap`. It leaves no trace, as above."""
    wrapper: Wrapped = _backend().swap_wrapper(module, policy_fn, swap_config=swap_config)
    return wrapper


@run_eagerly
def swap_tensor_wrapper(tree: Tree, tag: str | None = None) -> Tree:
    """Mark the tensors of ``tree`` inside a forward: their storages are swapped when autograd saves them.

    Returns the same tree. ``tag`` names them in the statistics. Outside grad mode nothing happens.
    """
    same: Tree = _backend().swap_tensor_wrapper(tree, tag)
    return same


def _check(who: str, function: Any, swap_config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a mistyped setting before it is taken for a keyword of the function."""
    setting_checks.check_swap_config(who, swap_config)
    setting_checks.check_call_keywords(who, function, kwargs)


def _backend() -> Any:  # the module hyper_parallel.backends.<framework>
    return adapter.current_backend()
