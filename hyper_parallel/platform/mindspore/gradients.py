"""Clipping gradients on MindSpore, which keeps none: the ones that the user put on ``parameter.grad`` are read.

A gradient of a parameter with a layout is of this rank's part. The norms of all ranks' parts are gathered and combined by
the same norm; a part that several ranks hold counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore
from mindspore import mint

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.mindspore import compat, sharded
from hyper_parallel.platform.mindspore.tensors import write_into

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Any:
    """See ``Platform.clip_grad_norm_``."""
    power, limit = float(norm_type), float(max_norm)
    if not limit >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or greater, got {max_norm}")
    owners = _tensors(parameters)
    grads = [owner.grad for owner in owners if getattr(owner, "grad", None) is not None]
    if owners and not grads:
        raise HyperParallelError(
            f"clip_grad_norm_: none of the {len(owners)} parameters has a gradient; because MindSpore keeps none on a "
            "parameter; put them there first: parameter.grad = gradient, for what value_and_grad returns"
        )
    with compat.no_grad():
        total = _total_norm(owners, power)
        if error_if_nonfinite and not bool(mint.isfinite(total).item()):
            raise HyperParallelError(
                f"clip_grad_norm_: cannot clip, the norm of order {power:g} of the gradients is {total.item()}; "
                f"no gradient was changed. Find the bad gradient, or pass error_if_nonfinite=False"
            )
        factor = mint.clamp(limit / (total + 1e-6), max=1.0)
        for grad in grads:
            # Arithmetic in place is not in place on the CPU: the product is written back.
            write_into(grad, (grad * factor.to(grad.dtype)).to(grad.dtype))
    return total


def _tensors(parameters: Any) -> list[Any]:
    """Each parameter once, whatever form they came in."""
    if isinstance(parameters, mindspore.nn.Cell):
        parameters = parameters.get_parameters()
    elif isinstance(parameters, mindspore.Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, Iterable):
        raise TypeError(
            f"clip_grad_norm_: expected a module, a tensor or an iterable of tensors, got {type(parameters).__name__}"
        )
    unique: dict[int, Any] = {}
    for parameter in parameters:
        if not isinstance(parameter, mindspore.Tensor):
            raise TypeError(f"clip_grad_norm_: the iterable holds a {type(parameter).__name__}, not a tensor")
        unique.setdefault(id(parameter), parameter)
    return list(unique.values())


def _total_norm(owners: list[Any], power: float) -> Any:
    families: dict[tuple[int, ...] | None, list[Any]] = {}
    for owner in owners:
        ranks = sharded.ranks_that_share(owner)
        # A parameter without a gradient on this rank still names its family: another rank may wait for us in it.
        family = families.setdefault(ranks, [])
        grad = getattr(owner, "grad", None)
        if grad is not None and grad.size and (ranks is None or sharded.counts_here(owner)):
            family.append(grad)
    # One dtype for what ranks send each other, decided by the parameters, which all of them have.
    is_wide = any(owner.dtype == mindspore.float64 for owner in owners)
    wire = mindspore.float64 if is_wide else mindspore.float32
    norms: list[Any] = []
    for ranks, grads in families.items():
        if ranks is None:
            norms += [_norm(grads, power)] if grads else []
            continue
        # Nothing here, but the others gather: the norm that adds nothing to theirs.
        own = _norm(grads, power) if grads else mindspore.Tensor(0.0 if power >= 0 else float("inf"))
        norms += sharded.gathered_norms(own.to(wire), ranks)
    if len(norms) < 2:
        return norms[0] if norms else _norm([], power)
    return sum(norms[1:], start=norms[0]) if power == 0.0 else _norm(norms, power)


def _norm(grads: list[Any], power: float) -> Any:
    """The norm of all elements; narrow dtypes are widened, because they have too few digits for a sum."""
    if not grads:
        return mindspore.Tensor(0.0, mindspore.float32)
    kinds = {grad.dtype for grad in grads}
    wide = mindspore.float64 if mindspore.float64 in kinds else mindspore.float32
    sizes = [mint.abs(grad.to(wide).contiguous()) for grad in grads]
    if power == float("inf"):
        return _largest([mint.max(size) for size in sizes])
    if power == float("-inf"):
        return -_largest([mint.max(-size) for size in sizes])
    if power == 0.0:
        return sum((mint.sum((size != 0).to(wide)) for size in sizes), start=mindspore.Tensor(0.0, wide))
    if power == 2.0:
        return mint.sqrt(sum((mint.sum(mint.square(size)) for size in sizes), start=mindspore.Tensor(0.0, wide)))
    powers = sum((mint.sum(mint.pow(size, power)) for size in sizes), start=mindspore.Tensor(0.0, wide))
    return mint.pow(powers, 1.0 / power)


def _largest(values: list[Any]) -> Any:
    return mint.max(mint.cat([value.reshape(1) for value in values]))
