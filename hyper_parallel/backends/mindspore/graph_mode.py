"""Graph mode and ``@jit`` around a region are refused by name: hooks and dispatch modes exist in PyNative mode only.

MindSpore compiles a function from its source, and without this it stops with an error about the syntax of ours. The source
that it reads is that of ``__wrapped__``. So the ``construct`` of a wrapper names there a function that calls a constant
expression; the compiler evaluates it, and it raises. ``hp.checkpoint`` and ``hp.swap`` do the same in
``platform/eager.py``. Graph mode as a setting is seen when a region is called.

Not refused: ``jit(capture_mode="trace")``, because an error inside a trace makes MindSpore's next op end the process. Its
gradients are right, and the region is no region from the second call on. Not refused either: ``capture_mode="bytecode"``,
which stops with an error of its own. A jitted cell inside a region is like one op and is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import mindspore
from mindspore import ops

from hyper_parallel.errors import CaptureError

__all__ = ["eager_only", "refuse_graphs"]

Fn = TypeVar("Fn", bound=Callable[..., Any])


def _refused(where: str, how: str) -> CaptureError:
    return CaptureError(
        f"{where}: cannot run {how}; because saved values are seen by hooks and dispatch modes, which MindSpore has in PyNative "
        "mode only. Use mindspore.set_context(mode=mindspore.PYNATIVE_MODE) and no @jit around the region; a jitted cell inside "
        "a region works: checkpoint_wrapper(jitted_cell)"
    )


def refuse_graphs(where: str) -> None:
    """Raise in graph mode."""
    if mindspore.get_context("mode") == mindspore.GRAPH_MODE:
        raise _refused(where, "in graph mode")


@ops.constexpr  # type: ignore[untyped-decorator]
def _refuse_compilation() -> NoReturn:
    """The compiler runs it to know its value."""
    raise _refused("a wrapped cell", "in graph mode or inside @jit")


def _in_a_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _refuse_compilation()


def eager_only(construct: Fn) -> Fn:
    """Mark the ``construct`` of a region: the compiler reads another function in its place, which raises."""
    construct.__wrapped__ = _in_a_graph  # type: ignore[attr-defined]
    return construct
