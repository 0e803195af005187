"""The shapes that a step was measured with, so that a longer batch can be told from them later."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hyper_parallel.records.record_files import require

__all__ = ["InputShape", "StepInputs"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputShape:
    """One tensor that a module was called with."""

    name: str  # as the module's forward names it: "input_ids", "batch[0]"
    shape: tuple[int, ...]
    dtype: str = ""

    def __post_init__(self) -> None:
        require(all(size >= 0 for size in self.shape), f"InputShape {self.name}: {self.shape} has a negative size")

    def __str__(self) -> str:
        return f"{self.name} {self.shape}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInputs:
    """What one module was called with in the measured step; of several calls the largest of each size."""

    module: str  # its path; "": the model itself
    tensors: tuple[InputShape, ...]

    def merged(self, tensors: Sequence[InputShape]) -> StepInputs:
        """These, and what another call was given."""
        mine = {tensor.name: tensor for tensor in self.tensors}
        for other in tensors:
            known = mine.get(other.name)
            if known is None or len(known.shape) != len(other.shape):
                mine[other.name] = other
            else:
                sizes = tuple(map(max, known.shape, other.shape))
                mine[other.name] = dataclasses.replace(other, shape=sizes)
        return dataclasses.replace(self, tensors=tuple(mine.values()))

    def longer_in(self, tensors: Sequence[InputShape]) -> list[tuple[InputShape, InputShape]]:
        """Pairs of (fitted, given) where a size is larger than any that was measured.

        More of one size and less of another counts too: attention grows with the square of a sequence.
        """
        mine = {tensor.name: tensor for tensor in self.tensors}
        pairs = [(mine[given.name], given) for given in tensors if given.name in mine]
        return [
            (fitted, given)
            for fitted, given in pairs
            if len(fitted.shape) == len(given.shape) and any(a < b for a, b in zip(fitted.shape, given.shape))
        ]
