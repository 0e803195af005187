"""Clipping gradients that may be plain, sharded, replicated or partial, all in one model.

The norm of a whole is made of norms of parts. Each rank takes the norm of what it holds; along every mesh dim that
shards a gradient the ranks' norms are gathered and combined by the same norm; along a dim that replicates it nothing
is added. A partial gradient is not yet a gradient, so it is summed first (a copy: the gradient itself stays partial,
and scaling it commutes with the sum).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.torch.compat import DTensor, foreach_norm

__all__ = ["clip_grad_norm_"]

_Family = tuple[Any, tuple[int, ...]]
"""A mesh (None for plain tensors) and its dims that shard."""


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """See ``Platform.clip_grad_norm_``."""
    power, limit = float(norm_type), float(max_norm)
    if not limit >= 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be 0 or greater, got {max_norm}")
    owners = _tensors(parameters)
    with torch.no_grad():
        total = _total_norm(owners, power, foreach)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise HyperParallelError(
                f"clip_grad_norm_: cannot clip, the norm of order {power:g} of the gradients is {total.item()}; "
                f"no gradient was changed. Find the bad gradient, or pass error_if_nonfinite=False"
            )
        _scale(owners, torch.clamp(limit / (total + 1e-6), max=1.0), foreach)
    return total


def _tensors(parameters: Any) -> list[torch.Tensor]:
    """Each parameter once, whatever form they came in."""
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    elif not isinstance(parameters, Iterable):
        raise TypeError(
            f"clip_grad_norm_: expected a module, a tensor or an iterable of tensors, got {type(parameters).__name__}"
        )
    unique: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"clip_grad_norm_: the iterable holds a {type(parameter).__name__}, not a tensor")
        unique.setdefault(id(parameter), parameter)
    return list(unique.values())


def _family(tensor: torch.Tensor) -> _Family:
    if not isinstance(tensor, DTensor):
        return None, ()
    placements = enumerate(tensor.placements)
    return tensor.device_mesh, tuple(dim for dim, p in placements if not p.is_replicate() and not p.is_partial())


def _total_norm(owners: list[torch.Tensor], power: float, foreach: bool | None) -> torch.Tensor:
    families: dict[_Family, list[torch.Tensor]] = {}
    for owner in owners:
        # A parameter without a gradient on this rank still names its family: another rank may wait for us in it.
        grad = None if owner.grad is None else _summed(owner.grad)
        family = families.setdefault(_family(owner if grad is None else grad), [])
        if grad is not None:
            family.append(grad)
    # One dtype for what ranks send each other, decided by the parameters, which all of them have.
    wire = torch.float64 if any(owner.dtype is torch.float64 for owner in owners) else torch.float32
    norms = [_family_norm(family, grads, power, foreach, wire) for family, grads in families.items()]
    present = [norm for norm in norms if norm is not None]
    return _combine(present, power) if present else torch.tensor(0.0)


def _summed(grad: torch.Tensor) -> torch.Tensor:
    if not isinstance(grad, DTensor) or not any(placement.is_partial() for placement in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    return grad.redistribute(grad.device_mesh, placements)


def _family_norm(
    family: _Family, grads: list[torch.Tensor], power: float, foreach: bool | None, wire: torch.dtype
) -> torch.Tensor | None:
    mesh, sharded_dims = family
    parts = [part for part in map(_values, grads) if part.numel()]
    if parts:
        norm = _combine(_norms(parts, power, foreach), power)
    elif mesh is None or not sharded_dims:
        return None
    else:
        # Nothing here, but the others gather: the norm that adds nothing to theirs.
        norm = torch.tensor(0.0 if power >= 0 else float("inf"))
    for dim in sharded_dims:
        norm = _combine(_gathered(norm.to(mesh.device_type, wire), mesh.get_group(dim)), power)
    return norm


def _values(grad: torch.Tensor) -> torch.Tensor:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.coalesce().values() if local.is_sparse else local


def _norms(parts: list[torch.Tensor], power: float, foreach: bool | None) -> list[torch.Tensor]:
    if power == 0.0:
        return [(part != 0).sum().to(torch.float32) for part in parts]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for part in parts:
        by_kind.setdefault((part.device, part.dtype), []).append(part)
    norms: list[torch.Tensor] = []
    for (_, dtype), same in by_kind.items():
        # Eight bits of mantissa would make the norm depend on how the gradients are cut.
        wide = torch.float32 if dtype.itemsize < 4 else None
        if foreach is False:
            norms += [torch.linalg.vector_norm(part, power, dtype=wide) for part in same]
        else:
            norms += foreach_norm(same, power, wide)
    return norms


def _gathered(norm: torch.Tensor, group: Any) -> list[torch.Tensor]:
    everyone = [torch.empty_like(norm) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(everyone, norm, group=group)
    return everyone


def _combine(norms: list[torch.Tensor], power: float) -> torch.Tensor:
    if len(norms) == 1:
        return norms[0]
    wide = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(norms[0].device, wide) for norm in norms])
    return stacked.sum() if power == 0.0 else torch.linalg.vector_norm(stacked, power)


def _scale(owners: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    grads = [owner.grad for owner in owners if owner.grad is not None]
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for local in locals_:
        by_device.setdefault(local.device, []).append(local)
    for device, same in by_device.items():
        here = factor.to(device)
        if foreach is False or any(local.is_sparse for local in same):
            for local in same:
                local.mul_(here.to(local.dtype))
        else:
            torch._foreach_mul_(same, here)
