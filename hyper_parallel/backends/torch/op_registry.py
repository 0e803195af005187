"""Which op names a policy can meet on torch: the registered ops, without those that torch takes apart before a policy sees them.

``aten.linear`` exists, and no policy is ever asked about it: it runs as ``aten.addmm`` or ``aten.mm``. A list that names it
would save nothing, so it is refused like a name that does not exist.
"""

from __future__ import annotations

import difflib
import functools
from typing import Any, Final

import torch

from hyper_parallel.errors import PolicyError

__all__ = ["check_op_names"]

_OWN_KERNELS: Final = ("CPU", "CUDA", "XPU", "PrivateUse1", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1")
_COMPOSITE: Final = "CompositeImplicitAutograd"
_SDPA: Final = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
_RUN_AS: Final = {
    "linear": ("addmm", "mm"),
    "matmul": ("mm", "addmm", "bmm"),
    "einsum": ("bmm", "mm"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), ("convolution",)),
    **dict.fromkeys(("sdpa", "scaled_dot_product_attention"), _SDPA),
}
"""What torch makes of names that have little in common with the ops that run."""


def check_op_names(names: list[str], where: str) -> None:
    """Refuse names that match no op.

    Raises:
        PolicyError: no op of that name exists, or torch runs it as other ops.
    """
    if _seen_names().issuperset(names):
        return
    _seen_names.cache_clear()  # a library that was imported since may have registered its own
    seen = _seen_names()
    registered = {one for qualified in torch._C._dispatch_get_all_op_names() for one in _names_of(qualified)}
    for name in names:
        # An op that torch runs as others is seen where a kernel calls it, so only the well-known ones are refused.
        if name in seen or (name in registered and _base(name) not in _RUN_AS):
            continue
        why = "which torch runs as other ops" if name in registered else "and there is no op of that name"
        raise PolicyError(
            f"{where}: the list of ops to save names {name!r}, {why}. {_near(name, seen)}"
            "hp.list_ops(model, step) lists the ops of a step."
        )


def _base(name: str) -> str:
    return name.split(".")[1] if name.startswith("aten.") else name


def _near(name: str, seen: frozenset[str]) -> str:
    base = _base(name)
    if base in _RUN_AS:
        return f"Did you mean {', '.join(_RUN_AS[base])}? "
    inside = sorted((one for one in seen if "." not in one and base in one), key=len) if len(base) > 3 else []
    found = list(dict.fromkeys([*difflib.get_close_matches(name, seen, n=3, cutoff=0.7), *inside[:4]]))[:4]
    return f"Did you mean {', '.join(found)}? " if found else ""


@functools.cache
def _seen_names() -> frozenset[str]:
    """Every name of every op that a policy can be asked about."""
    seen: set[str] = set()
    never_seen: set[str] = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        (never_seen if _is_taken_apart(qualified) else seen).update(_names_of(qualified))
    # A short name means torch's own op first: quantized.linear does not make "linear" a name that comes up.
    seen -= {name for name in never_seen if "." not in name and f"aten.{name}" in never_seen - seen}
    return frozenset(seen | _higher_order_names())


def _names_of(qualified: str) -> tuple[str, ...]:
    """``aten::mm`` as a policy may name it: ``aten.mm.default``, ``aten.mm`` and ``mm``."""
    namespace, _, rest = qualified.partition("::")
    base, _, overload = rest.partition(".")
    return f"{namespace}.{base}.{overload or 'default'}", f"{namespace}.{base}", base


def _is_taken_apart(qualified: str) -> bool:
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    if qualified.partition(".")[2].endswith("out"):
        return True  # writes an argument: autograd refuses it, so no policy meets it either
    return has_kernel(qualified, _COMPOSITE) and not any(has_kernel(qualified, key) for key in _OWN_KERNELS)


def _higher_order_names() -> set[str]:
    import torch._higher_order_ops  # registers them

    registered: Any = getattr(torch._ops, "_higher_order_ops", {})
    return {str(name) for name in registered} | {f"higher_order.{name}" for name in registered}
