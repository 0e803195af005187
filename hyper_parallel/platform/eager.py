"""A mark for functions that a compiler must not trace. Imports no framework: the mark is a few attributes.

Torch's compiler reads two of them before it traces a function: it breaks the graph there, runs the function eagerly, and
gives the reason where the user asked for a whole graph. MindSpore's compiler reads the source of ``__wrapped__``, and there
finds an error that names PyNative mode. ``inspect`` still finds the function's own signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["EAGER_REASON", "run_eagerly"]

EAGER_REASON: Final = (
    "hyper_parallel.checkpoint, hyper_parallel.swap and wrappers with a context_fn run eagerly: torch.compile breaks the graph "
    "here. Use checkpoint_wrapper(layer) instead, which becomes a part of the graph, or compile the module inside the wrapper: "
    "checkpoint_wrapper(torch.compile(layer)), swap_wrapper(torch.compile(layer))."
)

MINDSPORE_REASON: Final = (
    "hyper_parallel: checkpoint, swap and swap_tensor_wrapper cannot run in graph mode or inside @jit; because saved values are "
    "seen by hooks and dispatch modes, which MindSpore has in PyNative mode only. Call them outside; a jitted cell inside a "
    "region works: hp.checkpoint(jitted_cell, x)"
)

Fn = TypeVar("Fn", bound=Callable[..., Any])


def run_eagerly(function: Fn) -> Fn:
    """Mark ``function``."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = EAGER_REASON  # type: ignore[attr-defined]
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    function.__wrapped__ = _in_a_mindspore_graph  # type: ignore[attr-defined]
    return function


def _in_a_mindspore_graph(*args: Any, **kwargs: Any) -> Any:  # never called: compiled, and then it is this error
    raise RuntimeError(MINDSPORE_REASON)
