"""A mark for functions that a compiler must not trace. Imports no framework: the mark is two attributes.

Torch's compiler reads them before it traces a function: it breaks the graph there, runs the function eagerly, and gives
the reason where the user asked for a whole graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["EAGER_REASON", "run_eagerly"]

EAGER_REASON: Final = (
    "hyper_parallel.checkpoint, hyper_parallel.swap and wrappers with a context_fn run eagerly: torch.compile breaks the graph "
    "here. Use checkpoint_wrapper(layer) instead, which becomes a part of the graph, or compile the module inside the wrapper: "
    "checkpoint_wrapper(torch.compile(layer)), swap_wrapper(torch.compile(layer))."
)

Fn = TypeVar("Fn", bound=Callable[..., Any])


def run_eagerly(function: Fn) -> Fn:
    """Mark ``function``."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = EAGER_REASON  # type: ignore[attr-defined]
    return function
