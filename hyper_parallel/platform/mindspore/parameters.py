"""Finding, replacing, laying out and filling parameters on MindSpore.

MindSpore has no distributed tensor. A parameter with a layout is a plain parameter whose data is this rank's part; the
layout, the whole shape and where the part lies in it are kept on the parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, Final

import mindspore
import numpy as np
from mindspore import mint

from hyper_parallel.platform.base.layouts import ParameterLayout
from hyper_parallel.platform.mindspore import compat
from hyper_parallel.platform.mindspore.tensors import detached

__all__ = [
    "Part",
    "fill",
    "find",
    "is_meta",
    "local_data",
    "part_of",
    "replace_everywhere",
    "set_data",
    "set_layout",
]

_PART: Final = "_hyper_parallel_part"
_UNSHARDED: Final = -1
"""How MindSpore marks, in a tensor map, a dim that no axis of the device matrix cuts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a parameter with a layout knows about the whole of which its data is a part."""

    layout: Any  # mindspore.parallel.Layout
    whole_shape: tuple[int, ...]
    slices: tuple[slice, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks that the layout is over, in its own order."""
        return [int(rank) for rank in self.layout.to_dict()["rank_list"]]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(part.stop - part.start for part in self.slices)

    @property
    def is_whole(self) -> bool:
        """Whether the layout cuts no dim."""
        return self.shape == self.whole_shape

    def slices_of(self, rank: int) -> tuple[slice, ...]:
        """Where the part of ``rank`` lies."""
        return _local_slices(self.whole_shape, self.layout.to_dict(), rank)


def part_of(param: Any) -> Part | None:  # mindspore.Parameter
    """The parameter's part, or None where it has no layout."""
    part: Part | None = getattr(param, _PART, None)
    return part


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


def _of_mindspore(layout: Any, param: Any, world_size: int) -> Any:
    """A ``ParameterLayout`` as MindSpore's; anything else as it is."""
    if not isinstance(layout, ParameterLayout):
        return layout
    layout.check_shape(param.shape)
    ranks = layout.ranks_in(world_size)
    made = mindspore.parallel.Layout(tuple(layout.mesh.values()), tuple(layout.mesh), rank_list=list(ranks))
    return made(*(axis or "None" for axis in layout.dims))


def set_layout(param: Any, layout: Any, rank: int, world_size: int) -> Any:  # mindspore.Parameter
    """Give a parameter a ``mindspore.parallel.Layout`` or a ``ParameterLayout``; returns the parameter.

    What is left of it is this rank's part of its own values. Nothing is sent: all ranks must have the same values before.
    """
    part = part_of(param)
    if part is not None:
        raise ValueError(
            f"set_layout_into_parameter: a parameter of shape {part.whole_shape} already has "
            f"{part.layout.to_dict()}; a second layout is refused. Make a new parameter for it"
        )
    layout = _of_mindspore(layout, param, world_size)
    if not isinstance(layout, mindspore.parallel.Layout) or layout.to_dict().get("tensor_map") is None:
        raise TypeError(
            f"set_layout_into_parameter: a layout on MindSpore is a mindspore.parallel.Layout that was called with the "
            f"axis of each dim, such as Layout((2, 2), ('dp', 'tp'))('dp', 'None'), or a ParameterLayout; got {layout!r}"
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
    shape = tuple(param.shape)
    part = Part(layout=layout, whole_shape=shape, slices=_local_slices(shape, record, rank))
    _keep_part(param, part)
    _attach(param, part)
    return param


def _attach(param: Any, part: Part) -> None:
    setattr(param, _PART, part)
    # MindSpore copies none of a parameter's own attributes: the copy would pass its part off as the whole. The weak
    # reference keeps the parameter out of a cycle, so that its memory is returned at once.
    param.__deepcopy__ = functools.partial(_copy_with_part, weakref.ref(param))


def _copy_with_part(reference: Any, memo: Any) -> Any:  # weakref.ref of a mindspore.Parameter
    param = reference()
    made = mindspore.Parameter.__deepcopy__(param, memo)
    _attach(made, getattr(param, _PART))
    return made


def _keep_part(param: Any, part: Part) -> None:
    if is_meta(param):
        param._update_data(mint.empty(part.shape, dtype=param.dtype, device="meta"))
        return
    if param.has_init:
        param.init_data()
    grad = getattr(param, "grad", None)
    set_data(param, detached(param)[part.slices].copy())
    if grad is not None:
        param.grad = detached(grad)[part.slices].copy()


def _axes(axes: Any) -> tuple[int, ...]:
    return tuple(axis for axis in (axes if isinstance(axes, tuple | list) else (axes,)) if axis != _UNSHARDED)


def _pieces(device_matrix: Any, axes: Any) -> int:
    # A tensor map counts the axes of the device matrix from the right.
    return int(np.prod([device_matrix[-1 - axis] for axis in _axes(axes)], dtype=int))


def _local_slices(shape: tuple[int, ...], record: dict[str, Any], rank: int) -> tuple[slice, ...]:
    device_matrix = record["device_matrix"]
    ranks = list(record["rank_list"])
    if rank not in ranks:
        raise ValueError(
            f"set_layout_into_parameter: rank {rank} holds nothing; because the layout is over the ranks {ranks}; "
            f"call it on these ranks only"
        )
    place = np.unravel_index(ranks.index(rank), device_matrix)
    slices = []
    for dim, axes in enumerate(record["tensor_map"]):
        index = 0
        for axis in _axes(axes):
            index = index * device_matrix[-1 - axis] + int(place[-1 - axis])
        rows = shape[dim] // _pieces(device_matrix, axes)
        slices.append(slice(index * rows, (index + 1) * rows))
    return tuple(slices)


def local_data(param: Any) -> Any:
    """What this rank holds of ``param``, sharing its memory, without autograd history."""
    return detached(param)


def set_data(param: Any, data: Any) -> None:
    """Let ``param`` use ``data`` without a copy; one with a layout takes this rank's part."""
    part = part_of(param)
    if part is not None and tuple(data.shape) != part.shape:
        raise ValueError(
            f"update_param_data: this rank holds {part.shape} of the sharded parameter and was given "
            f"{tuple(data.shape)}; give the local part, or use load_into_param for the whole"
        )
    param._update_data(detached(data))
    drop_initialiser(param)


def drop_initialiser(param: Any) -> None:
    """Drop a pending initialiser: the parameter has its values, and MindSpore would overwrite them with it."""
    param.init_mode = None
    param.init = None


def fill(param: Any, data: Any) -> None:
    """Copy ``data`` into a plain, sharded or meta parameter, in the parameter's own dtype.

    One with a layout takes the whole, of which this rank keeps its part, or the part.
    """
    source = detached(data)
    part = part_of(param)
    if part is not None and tuple(data.shape) == part.whole_shape:
        source = source[part.slices]
    if tuple(source.shape) != tuple(param.shape):
        known = f"shape {tuple(param.shape)} and the data {tuple(data.shape)}"
        if part is not None:
            known = f"shape {part.whole_shape}, this rank's part {part.shape}; the data has {tuple(data.shape)}"
        raise ValueError(f"load_into_param: the parameter has {known}")
    source = source.to(param.dtype)
    if is_meta(param) or param.has_init:
        set_data(param, source.copy())
    else:
        with compat.no_grad():
            param.copy_(source)
