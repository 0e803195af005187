"""One block's forward, written down op by op: what the observers of both frameworks fill."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

__all__ = ["SIDE_OUTPUT", "ObservedCall", "ObservedOp"]

SIDE_OUTPUT: Final = 8  # an output this many times smaller than all of an op's outputs is a by-product


@dataclasses.dataclass
class ObservedOp:
    """One op instance of one block call."""

    name: str
    overload: str
    module: str
    occurrence: int
    is_asked: bool  # whether a region's policy is asked about it
    is_keepable: bool
    reason: str
    is_random: bool
    sequence: int  # of the autograd node it belongs to
    output_bytes: int = 0
    kept_bytes: int = 0
    workspace_bytes: int = 0
    inputs: tuple[int, ...] = ()
    alias: int | None = None
    kept_by: set[int] = dataclasses.field(default_factory=set)
    runs_once: bool = False  # a collective, which no replay runs again
    start: Any = None  # a meter's mark
    end: Any = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """What identical blocks have in common."""
        return self.name, self.overload, self.module, self.output_bytes, self.is_keepable, self.alias, self.inputs


@dataclasses.dataclass
class ObservedCall:
    """One call of one block."""

    block: str
    ops: list[ObservedOp] = dataclasses.field(default_factory=list)
    input_storages: dict[int, int] = dataclasses.field(default_factory=dict)  # storage key: bytes
    input_kept_by: set[int] = dataclasses.field(default_factory=set)
    first_sequence: int = 0
    last_sequence: int = 0
    module_calls: dict[str, int] = dataclasses.field(default_factory=dict)  # inside the block, by path

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for blocks of one kind."""
        return tuple(op.signature for op in self.ops)
