"""The moments of a training step, and bytes by moment.

Memory is scarce at one moment and free at another: what the loss needs is gone before the first block's backward ends. So
peaks are measured, predicted and corrected for each moment separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

__all__ = ["MOMENTS", "MomentBytes"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentBytes:
    """One number of bytes for each moment, in the order in which they come."""

    prologue_forward: int = 0  # before the first block: the embedding
    blocks_forward: int = 0
    head_and_loss: int = 0  # from the last block's forward to its backward
    blocks_backward: int = 0  # with everything that is replayed
    prologue_backward: int = 0  # after the first block's backward

    def __iter__(self) -> Iterator[int]:
        return iter(getattr(self, name) for name in MOMENTS)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> MomentBytes:
        """From one number for each moment, in their order."""
        return cls(**dict(zip(MOMENTS, numbers, strict=True)))

    def joined(self, other: MomentBytes, join: Callable[[int, int], int]) -> MomentBytes:
        """``join(mine, other's)`` for each moment."""
        return MomentBytes.of([join(mine, theirs) for mine, theirs in zip(self, other)])


MOMENTS: Final = tuple(field.name for field in dataclasses.fields(MomentBytes))
