"""Recomputing a region with ``mindspore.recompute``, and refusing what it would get wrong.

A recomputed region must draw the same random numbers twice. On the CPU MindSpore's random ops follow no state that can
be put back, so a dropout in a region would silently get the gradient of another mask. There random ops are refused;
on Ascend MindSpore restores their state.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import mindspore

from hyper_parallel.errors import ActivationError
from hyper_parallel.platform.mindspore.device import on_cpu

__all__ = ["framework_checkpoint"]

_RANDOM_OP: Final = re.compile(r"dropout|rand|uniform|normal(?!i)|laplace|bernoulli|multinomial|gamma$|poisson", re.I)
"""Names of ops that draw: StandardNormal, UniformReal, RandpermV2, Dropout2D ..., but not Normalize."""
_FOREIGN_OPTIONS: Final = ("preserve_rng_state", "determinism_check", "debug")
"""Options of other checkpoint functions, which MindSpore would hand to the region as arguments."""


class _RefuseRandomOps(mindspore.MsDispatchMode):  # type: ignore[misc]
    """Lets every op of the forward pass through but those that draw random numbers."""

    def __ms_dispatch__(self, func: Any, args: Any, kwargs: Any = None) -> Any:
        """Run the op, or say why it cannot be recomputed."""
        if _RANDOM_OP.search(func.name):
            raise ActivationError(
                f"checkpoint: cannot recompute {func.name}; because MindSpore on the CPU cannot draw the same random "
                "numbers again, and the gradient would be wrong; keep the op outside the region, or save its result "
                "with context_fn"
            )
        return func(*args, **(kwargs or {}))


def _refuse_random_ops() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return _RefuseRandomOps(), nullcontext()


def framework_checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context_fn: Callable[[], Any] | None = None,
    early_stop: bool = False,
    **kwargs: Any,
) -> Any:
    """``mindspore.recompute``, always in its non-reentrant form. With ``context_fn`` random ops are the caller's care.

    ``early_stop`` is off unless asked for: in MindSpore 2.10 it fails where the region's last saved value is made by
    one of the older primitives, such as a LayerNorm.
    """
    if kwargs.pop("use_reentrant", False):
        raise ValueError(
            "checkpoint: use_reentrant=True is not the form that serves functions and contexts; leave it out"
        )
    foreign = [option for option in _FOREIGN_OPTIONS if option in kwargs]
    if foreign:
        raise ValueError(
            f"checkpoint: {foreign} are not options of mindspore.recompute; its own are context_fn, early_stop, "
            "output_recompute and save_rng_state"
        )
    if context_fn is None and on_cpu():
        context_fn = _refuse_random_ops
    return mindspore.recompute(
        function, *args, use_reentrant=False, context_fn=context_fn, early_stop=early_stop, **kwargs
    )
