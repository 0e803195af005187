"""Compiled modules inside blocks.

Plans, rules and profiles decide about single ops. Compiled code hides them: most run inside fused kernels that no dispatch
mode sees, and a buffer that a visible op made may be overwritten by an invisible kernel. A value saved there could change
without a trace. Running such a block uncompiled instead would change its numbers and its speed silently.

* Wrappers, rules (with the presets) and plans on a block that is compiled as a whole put their region into its graph.
* Profiles and tables of ops run such a block uncompiled, in trial steps alone, to see its ops.
* Where only a part of a block is compiled, and where the whole model is, they are refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.planning.module_tree import BlockRef
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.torch import compat

__all__ = ["is_compiled", "refuse_compiled", "refuse_compiled_around", "run_uncompiled"]


def is_compiled(block: nn.Module) -> bool:
    """Whether a block is compiled as a whole."""
    return compat.compiler_of(block) is not None


def run_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; whatever is compiled inside runs uncompiled."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run


def refuse_compiled(path: str, block: nn.Module, *, may_be_whole: bool = False) -> None:
    """Refuse a block that is compiled, or that holds a compiled module. ``may_be_whole``: only where a part of it is."""
    if may_be_whole and compat.compiler_of(block) is not None:
        return
    for inner, module in block.named_modules():
        how = _how_compiled(module)
        if how is not None:
            where = f"{path}.{inner}" if inner else path
            raise PlanError(
                f"{path}: cannot follow a plan or rules, because {where} is compiled ({how}), and compiled code does not show "
                "its single ops. The model is as it was. Compile the whole block instead: torch.compile(block) or "
                "block.compile(). Plans, rules and wrappers put their decisions into the block's graph then."
            )


def refuse_compiled_around(who: str, model: nn.Module, blocks: Sequence[BlockRef]) -> None:
    """Refuse blocks inside a compiled module: a trial step cannot treat them one by one there."""
    modules = dict(model.named_modules())
    for block in blocks:
        names = block.name.split(".")
        for count in range(len(names)):
            path = ".".join(names[:count])
            how = _how_compiled(modules[path])
            if how is not None:
                raise PlanError(
                    f"{who}: cannot measure {block.name}, because {path or 'the model'} around it is compiled as one graph "
                    f"({how}). "
                    "Compile block by block: torch.compile(block) or block.compile() for each block. Inside one graph, "
                    "hp.checkpoint_wrapper, presets and rules work without a budget."
                )


def _how_compiled(module: nn.Module) -> str | None:
    compiler = sys.modules.get("torch._dynamo")  # imported by the first compilation; importing it takes a second
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "torch.compile(module)"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "module.compile()"
    forward: Any = module.__dict__.get("forward", type(module).forward)
    if hasattr(forward, "_torchdynamo_orig_callable"):
        return "torch.compile on its forward"
    return None
