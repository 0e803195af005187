"""Finding, replacing, laying out and filling parameters on MindSpore.

MindSpore has no distributed tensor. A layout is kept on the parameter, whose data stays whole on every rank; what this
rank would hold of it follows from the layout and the rank.
"""

from __future__ import annotations

from typing import Any, Final

import mindspore
import numpy as np

from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = ["fill", "find", "is_meta", "local_data", "replace_everywhere", "set_data", "set_layout"]

_LAYOUT: Final = "_hyper_parallel_layout"
_UNSHARDED: Final = -1
"""How MindSpore marks, in a tensor map, a dim that no axis of the device matrix cuts."""


def is_meta(tensor: Any) -> bool:  # mindspore.Tensor
    """Whether a tensor has a shape and no bytes."""
    return str(tensor.device).lower().startswith("meta")


def find(root: Any, path: str) -> Any:  # mindspore.nn.Cell -> mindspore.Parameter
    """The parameter of that dotted path, or None; each name of a tied parameter finds it."""
    cell = root
    *steps, last = path.split(".")
    for step in steps:
        cell = cell._cells.get(step)
        if cell is None:
            return None
    return cell._params.get(last)


def replace_everywhere(root: Any, old: Any, new: Any) -> int:
    """Put ``new`` wherever a cell under ``root`` holds ``old``, so that tied weights stay tied; how many places."""
    new.name = old.name
    count = 0
    for _, cell in root.cells_and_names():
        for key, parameter in list(cell._params.items()):
            if parameter is old:
                cell._params[key] = new
                count += 1
        for key, group in list(cell._params_list.items()):
            if any(parameter is old for parameter in group):
                cell._params_list[key] = type(group)([new if parameter is old else parameter for parameter in group])
                count += 1
    return count


def set_layout(param: Any, layout: Any) -> Any:  # mindspore.Parameter, mindspore.parallel.Layout
    """Keep a layout on a parameter; returns the parameter."""
    if getattr(param, _LAYOUT, None) is not None:
        raise ValueError(
            f"set_layout_into_parameter: a parameter of shape {tuple(param.shape)} already has "
            f"{getattr(param, _LAYOUT).to_dict()}; a second layout is refused. Make a new parameter for it"
        )
    if not isinstance(layout, mindspore.parallel.Layout) or layout.to_dict().get("tensor_map") is None:
        raise TypeError(
            f"set_layout_into_parameter: a layout on MindSpore is a mindspore.parallel.Layout that was called with the "
            f"axis of each dim, such as Layout((2, 2), ('dp', 'tp'))('dp', 'None'); got {layout!r}"
        )
    record = layout.to_dict()
    if len(record["tensor_map"]) != param.ndim:
        raise ValueError(
            f"set_layout_into_parameter: the layout names {len(record['tensor_map'])} dims and the parameter has "
            f"shape {tuple(param.shape)}; give one axis, or 'None', for each dim"
        )
    for dim, axes in enumerate(record["tensor_map"]):
        pieces = _pieces(record["device_matrix"], axes)
        if param.shape[dim] % pieces:
            raise ValueError(
                f"set_layout_into_parameter: dim {dim} of shape {tuple(param.shape)} does not divide into {pieces} "
                f"pieces; choose another axis for it"
            )
    setattr(param, _LAYOUT, layout)
    return param


def _axes(axes: Any) -> tuple[int, ...]:
    return tuple(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if axis != _UNSHARDED)


def _pieces(device_matrix: Any, axes: Any) -> int:
    # A tensor map counts the axes of the device matrix from the right.
    return int(np.prod([device_matrix[-1 - axis] for axis in _axes(axes)], dtype=int))


def _local_slices(param: Any, record: dict[str, Any], rank: int) -> tuple[slice, ...]:
    device_matrix = record["device_matrix"]
    ranks = list(record["rank_list"])
    if rank not in ranks:
        raise ValueError(
            f"get_param_local_data: rank {rank} holds nothing; because the layout is over the ranks {ranks}"
        )
    place = np.unravel_index(ranks.index(rank), device_matrix)
    slices = []
    for dim, axes in enumerate(record["tensor_map"]):
        index = 0
        for axis in _axes(axes):
            index = index * device_matrix[-1 - axis] + int(place[-1 - axis])
        rows = param.shape[dim] // _pieces(device_matrix, axes)
        slices.append(slice(index * rows, (index + 1) * rows))
    return tuple(slices)


def local_data(param: Any, rank: int) -> Any:
    """What this rank holds of ``param``, without autograd history; the parameter itself where it has no layout."""
    layout = getattr(param, _LAYOUT, None)
    data = detached(param)
    return data if layout is None else data[_local_slices(param, layout.to_dict(), rank)]


def local_shape(param: Any, rank: int) -> tuple[int, ...]:
    """The shape of :func:`local_data`; also of a parameter without bytes."""
    layout = getattr(param, _LAYOUT, None)
    if layout is None:
        return tuple(param.shape)
    return tuple(part.stop - part.start for part in _local_slices(param, layout.to_dict(), rank))


def set_data(param: Any, data: Any) -> None:
    """Let ``param`` use ``data`` without a copy."""
    param._update_data(detached(data))
    settle(param)


def settle(param: Any) -> None:
    """Tell MindSpore that a parameter has its values: it would run a pending initialiser over them."""
    param.init_mode = None
    param.init = None


def fill(param: Any, data: Any) -> None:
    """Copy ``data`` into a plain or meta parameter, in the parameter's own dtype."""
    if tuple(data.shape) != tuple(param.shape):
        raise ValueError(
            f"load_into_param: the parameter has shape {tuple(param.shape)} and the data {tuple(data.shape)}"
        )
    source = detached(data).to(param.dtype)
    if is_meta(param) or param.has_init:
        set_data(param, source.copy())
    else:
        with compat.no_grad():
            param.copy_(source)
