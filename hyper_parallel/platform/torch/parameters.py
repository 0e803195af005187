"""Finding, replacing, sharding and filling parameters on torch."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.base.layouts import ParameterLayout
from hyper_parallel.platform.torch.compat import DTensor, become, set_local_tensor
from hyper_parallel.platform.torch.device import accelerator_type
from hyper_parallel.platform.torch.groups import TorchGroupMembers, live_group

__all__ = ["fill", "local_data", "replace_everywhere", "same_kind", "set_data", "set_layout"]

_SHARDED_FORM = "_hyper_parallel_sharded_parameter"
"""Where a parameter that got a layout remembers the sharded parameter made from it."""

_HOLDING_NAMES = ("_parameters", "_flat_weights", "params")
"""Under which names modules and optimizers keep the containers of their parameters."""


def replace_everywhere(root: torch.nn.Module, old: torch.nn.Parameter, new: torch.nn.Parameter) -> int:
    """Put ``new`` wherever a module under ``root`` holds ``old``, so that tied weights stay tied; how many places."""
    places = [
        (module, key) for module in root.modules() for key, parameter in module._parameters.items() if parameter is old
    ]
    for module, key in places:
        # Not through `_parameters`: a recurrent module also keeps its weights in a flat list, which setattr updates.
        setattr(module, key, new)
    return len(places)


def set_layout(param: torch.Tensor, layout: Any) -> torch.nn.Parameter:
    """Shard ``param`` over ``layout``, a pair (mesh, placements) or a ``ParameterLayout``; returns the DTensor parameter.

    torch cannot turn a plain parameter object into a sharded one. So the DTensor parameter takes its place in every
    module and every optimizer that holds it. The old object gives its bytes up and remembers the new one: the members of
    the platform mean the new one when they are given the old one. Finding the holders walks all objects of the process,
    some tens of milliseconds. As with ``distribute_tensor``, the first rank's values count and every rank of the mesh
    must call.
    """
    from torch.distributed.tensor import distribute_tensor

    if isinstance(param, DTensor) or hasattr(param, _SHARDED_FORM):
        current = local_owner(param)
        placed = f"{current.placements} over {current.device_mesh}" if isinstance(current, DTensor) else "a layout"
        raise ValueError(
            f"set_layout_into_parameter: a parameter of shape {tuple(param.shape)} already has {placed}; "
            f"a second layout is refused. Call redistribute() on its data instead"
        )
    mesh, placements = _checked_layout(_of_torch(layout, param))
    holders = _holders_of(param)
    made = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, placements), requires_grad=param.requires_grad)
    if param.grad is not None:
        made.grad = distribute_tensor(param.grad.detach(), mesh, placements)
        param.grad = None
    for container, key in holders:
        container[key] = made
    _give_up_bytes(param)
    setattr(param, _SHARDED_FORM, made)
    return made


def _holders_of(param: torch.Tensor) -> list[tuple[Any, Any]]:
    """Where modules and optimizers hold ``param``, as (dict or list, key or index)."""
    containers = [item for item in gc.get_referrers(param) if isinstance(item, dict | list)]
    if not containers:
        return []
    # An object that holds a container in an attribute is found as itself, or as its `__dict__`.
    objects = torch.nn.Module, torch.optim.Optimizer
    owners = [vars(item) if isinstance(item, objects) else item for item in gc.get_referrers(*containers)]
    # `_flat_weights`: a recurrent module keeps its weights in a list too. `params`: a group of an optimizer.
    named = [owner[name] for owner in owners if isinstance(owner, dict) for name in _HOLDING_NAMES if name in owner]
    found: dict[int, Any] = {id(item): item for item in containers if any(item is held for held in named)}
    for optimizer in (item for item in owners if isinstance(item, dict) and "param_groups" in item):
        if any(key is param for key in optimizer.get("state", ())):
            raise ValueError(
                f"set_layout_into_parameter: an optimizer has already stepped the parameter of shape {tuple(param.shape)}; "
                f"because its state would keep the old layout; give layouts before the first step"
            )
    return [
        (item, key)
        for item in found.values()
        for key, value in (list(item.items()) if isinstance(item, dict) else enumerate(item))
        if value is param
    ]


def _give_up_bytes(param: torch.Tensor) -> None:
    """Leave the shape and no values: what still computes with the old object shows it, in NaN."""
    if not param.is_meta:
        is_inexact = param.is_floating_point() or param.is_complex()
        param.data = param.data.new_full((), float("nan") if is_inexact else 0).expand(param.shape)


def _of_torch(layout: Any, param: torch.Tensor) -> Any:
    """A ``ParameterLayout`` as a mesh and placements; anything else as it is."""
    if not isinstance(layout, ParameterLayout):
        return layout
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    layout.check_shape(param.shape)
    world = live_group(None, member="set_layout_into_parameter")
    ranks, me = layout.ranks_in(world.size()), world.rank()
    if me not in ranks:
        raise ValueError(
            f"set_layout_into_parameter: rank {me} holds nothing; because the layout is over the ranks {list(ranks)}; "
            "call it on these ranks only"
        )
    # Groups of the ranks that take part, so that the others of the world need not call.
    groups = [_group_of(layout.ranks_along(axis, ranks, me), world) for axis in layout.mesh]
    grid = torch.tensor(ranks).reshape(tuple(layout.mesh.values()))
    mesh = DeviceMesh.from_group(groups, accelerator_type() or "cpu", grid, mesh_dim_names=tuple(layout.mesh))
    placements = [Shard(layout.dims.index(axis)) if axis in layout.dims else Replicate() for axis in layout.mesh]
    return mesh, placements


def _group_of(ranks: list[int], world: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup:
    return world if len(ranks) == world.size() else TorchGroupMembers.create_group(ranks)


def _checked_layout(layout: Any) -> tuple[Any, Sequence[Any]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    is_pair = isinstance(layout, tuple | list) and len(layout) == 2 and isinstance(layout[0], DeviceMesh)
    if not is_pair or not isinstance(layout[1], tuple | list):
        raise TypeError(
            f"set_layout_into_parameter: a layout on torch is (DeviceMesh, placements), such as "
            f"(mesh, [Shard(0)]), or a ParameterLayout; got {layout!r}"
        )
    mesh, placements = layout
    if len(placements) != mesh.ndim or not all(isinstance(placement, Placement) for placement in placements):
        raise ValueError(
            f"set_layout_into_parameter: a mesh of {mesh.ndim} dims needs {mesh.ndim} placements "
            f"(Shard, Replicate), one for each; got {list(placements)}"
        )
    if any(placement.is_partial() for placement in placements):
        raise ValueError("set_layout_into_parameter: a parameter cannot be Partial; use Shard or Replicate")
    return mesh, placements


def local_owner(param: torch.Tensor) -> torch.Tensor:
    """The sharded parameter made from ``param``, if there is one; else ``param``."""
    owner: torch.Tensor = getattr(param, _SHARDED_FORM, param)
    return owner


def local_data(param: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``param``, sharing its memory."""
    data = local_owner(param).detach()
    return data.to_local() if isinstance(data, DTensor) else data


def set_data(param: torch.Tensor, data: torch.Tensor) -> None:
    """Let ``param`` use ``data`` without a copy; a sharded one takes a DTensor of its layout, or its local part."""
    param = local_owner(param)
    if not isinstance(param, DTensor):
        if isinstance(data, DTensor):
            raise ValueError(
                f"update_param_data: a plain parameter of shape {tuple(param.shape)} cannot use a DTensor; "
                f"give data.full_tensor(), or shard the parameter first with set_layout_into_parameter"
            )
        param.data = data.detach()
        return
    if isinstance(data, DTensor):
        if (data.device_mesh, data.placements, data.shape) != (param.device_mesh, param.placements, param.shape):
            raise ValueError(
                f"update_param_data: the parameter is {param.placements} of {tuple(param.shape)} and the data "
                f"{data.placements} of {tuple(data.shape)}; redistribute the data first"
            )
        set_local_tensor(param, local_data(data))
        return
    local = local_data(param)
    if data.shape != local.shape:
        raise ValueError(
            f"update_param_data: this rank holds {tuple(local.shape)} of the sharded parameter and was given "
            f"{tuple(data.shape)}; give the local part, or use load_into_param for the whole"
        )
    set_local_tensor(param, data.detach())


def fill(param: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into a plain, sharded or meta parameter, in the parameter's own dtype."""
    param = local_owner(param)
    source = data.detach()
    if isinstance(param, DTensor):
        source = _in_layout_of(param, source)
    elif isinstance(source, DTensor):
        source = source.full_tensor()
    if source.shape != param.shape:
        raise ValueError(
            f"load_into_param: the parameter has shape {tuple(param.shape)} and the data {tuple(source.shape)}"
        )
    if param.is_meta:
        filled = source.to(dtype=param.dtype, copy=True)
        become(param, same_kind(param, filled))
    else:
        with torch.no_grad():
            param.copy_(source)


def _in_layout_of(param: DTensor, data: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import Replicate

    mesh = param.device_mesh
    if isinstance(data, DTensor):
        return data.redistribute(mesh, param.placements)
    data = data.to(mesh.device_type)
    local_shape = local_data(param).shape
    if data.shape == param.shape:
        # Every rank brings the whole: each keeps its own part, nothing is sent.
        whole = DTensor.from_local(data, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, param.placements)
    if data.shape == local_shape:
        return DTensor.from_local(
            data, mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    raise ValueError(
        f"load_into_param: the sharded parameter has shape {tuple(param.shape)}, this rank's part "
        f"{tuple(local_shape)}; the data has {tuple(data.shape)}, which is neither"
    )


def same_kind(param: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """``data`` as a tensor of the class, ``requires_grad`` and extra attributes of ``param``."""
    made: torch.Tensor
    if isinstance(data, DTensor) or type(param) is torch.nn.Parameter:
        made = torch.nn.Parameter(data, requires_grad=param.requires_grad)
    elif isinstance(param, torch.nn.Parameter):
        made = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    else:
        made = data.requires_grad_(param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made
