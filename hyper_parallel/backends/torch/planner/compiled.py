"""Compiled modules inside blocks.

Plans, rules and profiles decide about single ops. Compiled code hides them: most run inside fused kernels that no dispatch
mode sees, and a buffer that a visible op made may be overwritten by an invisible kernel. A value saved there could change
without a trace. Running such a block uncompiled instead would change its numbers and its speed silently.

* Wrappers and rules (with the presets) on a block that is compiled as a whole put their region into its graph.
* Plans and profiles of compiled blocks are refused by name: a profile measures single ops. So are rules where only a part of a
  block is compiled.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.torch import compat

__all__ = ["refuse_compiled"]


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
                "its single ops. The model is as it was. What works on blocks that are compiled as a whole: rules and presets "
                "(hp.apply_rules), hp.checkpoint_wrapper(block, policy_fn=..., swap_inputs=True) and hp.swap_wrapper(block)."
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
