"""The layout of a parameter in words of no framework."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

__all__ = ["ParameterLayout"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """How a parameter is cut over ranks: ``ParameterLayout(mesh={"dp": 2, "tp": 4}, dims=("tp", None))``.

    The ranks form a mesh with named axes, the last axis fastest. Each dim of the parameter is cut along one axis or along
    none, into equal parts. Ranks that differ only along the other axes hold the same part.
    """

    mesh: Mapping[str, int]  # axis -> how many ranks lie along it
    dims: tuple[str | None, ...]  # for each dim of the parameter: the axis that cuts it
    ranks: tuple[int, ...] | None = None  # of the mesh, ascending; None: all ranks of the world

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", MappingProxyType(dict(self.mesh)))
        object.__setattr__(self, "dims", tuple(self.dims))
        if not self.mesh:
            raise ValueError("ParameterLayout.mesh: has no axis; give at least one, such as {'tp': 4}")
        for axis, size in self.mesh.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"ParameterLayout.mesh: axis {axis!r} has {size!r} ranks; give a whole number, 1 or more"
                )
        unknown = [axis for axis in self.dims if axis is not None and axis not in self.mesh]
        if unknown:
            raise ValueError(
                f"ParameterLayout.dims: no axis {unknown[0]!r} in the mesh; known are {', '.join(self.mesh)}"
            )
        named = [axis for axis in self.dims if axis is not None]
        if len(set(named)) != len(named):
            raise ValueError(f"ParameterLayout.dims: {self.dims} cuts two dims along one axis; give each its own")
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))
            self._check_ranks(self.ranks)

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        if list(ranks) != sorted(set(ranks)) or len(ranks) != self.num_ranks:
            raise ValueError(
                f"ParameterLayout.ranks: {list(ranks)} does not fill a mesh of {self.num_ranks} ranks ({dict(self.mesh)}); "
                "give every rank of the mesh once, ascending"
            )

    @property
    def num_ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.mesh.values())

    def ranks_along(self, axis: str, ranks: Sequence[int], rank: int) -> list[int]:
        """The ranks that differ from ``rank`` along this axis alone, itself included; ``ranks`` are those of the mesh."""
        names, sizes = list(self.mesh), list(self.mesh.values())
        stride = math.prod(sizes[names.index(axis) + 1 :])
        place = ranks.index(rank)
        first = place - place // stride % self.mesh[axis] * stride
        return [ranks[first + step * stride] for step in range(self.mesh[axis])]

    def ranks_in(self, world_size: int) -> tuple[int, ...]:
        """The ranks of the mesh in a world of that size."""
        ranks = tuple(range(world_size)) if self.ranks is None else self.ranks
        if self.ranks is None and world_size != self.num_ranks:
            raise ValueError(
                f"set_layout_into_parameter: the mesh {dict(self.mesh)} has {self.num_ranks} ranks and the world {world_size}; "
                "give ParameterLayout(ranks=...) for a part of the world"
            )
        if max(ranks) >= world_size:
            raise ValueError(f"set_layout_into_parameter: there is no rank {max(ranks)} in a world of {world_size}")
        return ranks

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse a parameter that does not divide into equal parts."""
        if len(shape) != len(self.dims):
            raise ValueError(
                f"set_layout_into_parameter: the layout names {len(self.dims)} dims and the parameter has shape "
                f"{tuple(shape)}; give one axis, or None, for each dim"
            )
        for dim, axis in enumerate(self.dims):
            if axis is not None and shape[dim] % self.mesh[axis]:
                raise ValueError(
                    f"set_layout_into_parameter: dim {dim} of shape {tuple(shape)} does not divide into {self.mesh[axis]} "
                    "parts; choose another axis for it"
                )
