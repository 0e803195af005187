"""Compiled modules inside blocks.

Plans, rules and profiles decide about single ops. Compiled code hides them: most run inside fused kernels that no dispatch
mode sees, and a buffer that a visible op made may be overwritten by an invisible kernel. A value saved there could change
without a trace. Running such a block uncompiled instead would change its numbers and its speed silently. So a
compiled block is refused by name. Wrappers that treat a block as a whole (``checkpoint_wrapper``, ``swap_wrapper``) keep
nothing of single ops and work around compiled code.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hyper_parallel.errors import PlanError

__all__ = ["refuse_compiled"]


def refuse_compiled(path: str, block: nn.Module) -> None:
    """Refuse a block that is compiled, or that holds a compiled module."""
    for inner, module in block.named_modules():
        how = _how_compiled(module)
        if how is not None:
            where = f"{path}.{inner}" if inner else path
            raise PlanError(
                f"{path}: cannot follow a plan or rules, because {where} is compiled ({how}), and compiled code does not show "
                "its single ops. The model is as it was. Give the model before its blocks are compiled, or treat the compiled "
                "blocks as a whole: hp.checkpoint_wrapper(block, swap_inputs=True), hp.swap_wrapper(block)."
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
