"""Finding, replacing, sharding and filling parameters on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.torch.compat import DTensor, become, set_local_tensor

__all__ = ["fill", "local_data", "replace_everywhere", "same_kind", "set_data", "set_layout"]

_SHARDED_TWIN = "_hyper_parallel_sharded_parameter"
"""Where a parameter that got a layout remembers the sharded parameter made from it."""


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
    """A DTensor parameter with the values of ``param``, laid out over ``layout``, a pair (mesh, placements).

    torch cannot turn a plain parameter object into a sharded one, so this returns a new parameter, for
    ``update_parameter_by_name`` to put in place; the old one remembers it, and is refused a second layout. As with
    ``distribute_tensor``, the first rank's values count and every rank of the mesh must call.
    """
    from torch.distributed.tensor import distribute_tensor

    if isinstance(param, DTensor) or hasattr(param, _SHARDED_TWIN):
        current = local_owner(param)
        placed = f"{current.placements} over {current.device_mesh}" if isinstance(current, DTensor) else "a layout"
        raise ValueError(
            f"set_layout_into_parameter: a parameter of shape {tuple(param.shape)} already has {placed}; "
            f"a second layout is refused. Call redistribute() on its data instead"
        )
    mesh, placements = _checked_layout(layout)
    made = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, placements), requires_grad=param.requires_grad)
    if param.grad is not None:
        made.grad = distribute_tensor(param.grad.detach(), mesh, placements)
    setattr(param, _SHARDED_TWIN, made)
    return made


def _checked_layout(layout: Any) -> tuple[Any, Sequence[Any]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    is_pair = isinstance(layout, tuple | list) and len(layout) == 2 and isinstance(layout[0], DeviceMesh)
    if not is_pair or not isinstance(layout[1], tuple | list):
        raise TypeError(
            f"set_layout_into_parameter: a layout on torch is (DeviceMesh, placements), such as "
            f"(mesh, [Shard(0)]); got {layout!r}"
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
    owner: torch.Tensor = getattr(param, _SHARDED_TWIN, param)
    return owner


def local_data(param: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``param``, sharing its memory."""
    data = local_owner(param).detach()
    return data.to_local() if isinstance(data, DTensor) else data


def set_data(param: torch.Tensor, data: torch.Tensor) -> None:
    """Let ``param`` use ``data`` without a copy; a sharded one takes a DTensor of its layout, or its local part."""
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
    """``data`` as a tensor of the class, gradient wish and extra attributes of ``param``."""
    made: torch.Tensor
    if isinstance(data, DTensor) or type(param) is torch.nn.Parameter:
        made = torch.nn.Parameter(data, requires_grad=param.requires_grad)
    elif isinstance(param, torch.nn.Parameter):
        made = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    else:
        made = data.requires_grad_(param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made
