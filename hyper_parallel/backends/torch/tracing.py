"""How a wrapper behaves under tools that turn a model into a graph: ``torch.fx``, ``torch.export`` and ``torch.jit.script``.

* ``torch.fx.symbolic_trace``: the wrapper is one node of the graph, a call of the module, and works as before when the graph
  runs. A wrapper that is itself the root of the trace is refused.
* ``torch.export``: the wrapped module is exported as it is. An exported graph says nothing of what is kept for backward.
* ``torch.jit.script``: refused, because TorchScript cannot run Python around a region.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.errors import ActivationError

__all__ = ["is_exporting", "node_of_trace", "refuse_script"]


def is_exporting() -> bool:
    """Whether ``torch.export`` runs the model now."""
    return torch.compiler.is_exporting()


def node_of_trace(wrapper: torch.nn.Module, args: Any, kwargs: Any) -> Any:  # torch.fx.Proxy | None
    """The node that stands for this call in a symbolic trace; None outside of one."""
    if isinstance(args, torch.fx.Proxy):  # fx gives the root of a trace its variable arguments as one
        raise ActivationError(
            f"torch.fx: cannot trace a wrapped {_name(wrapper)} on its own, because a wrapper takes any arguments. Trace the "
            "model around it, or trace the module first and wrap the result."
        )
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.fx.Proxy):
            tracer = value.tracer
            if isinstance(tracer, torch.fx.Tracer):
                return tracer.create_proxy("call_module", tracer.path_of_module(wrapper), args, kwargs)
    return None


def refuse_script(wrapper: torch.nn.Module) -> None:
    """Say that TorchScript cannot have the wrapper."""
    raise ActivationError(
        f"torch.jit.script: cannot compile a wrapped {_name(wrapper)}, because TorchScript cannot run the Python around a "
        "region. Put the module itself back (wrapper.wrapped_module, or remove() of what wrapped it) before scripting, or use "
        "torch.jit.trace or torch.export."
    )


def _name(wrapper: Any) -> str:
    return type(wrapper.wrapped_module).__name__
